"""Random plans, bytes counted where they reach torch.distributed, and a planned module beside one process."""

import random

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.state import Decisions
from mindspeed_autoparallel.operators.torch.planned import PlannedModule
from mindspeed_autoparallel.operators.torch.redistribute import MeshGroups

torch.ones((), requires_grad=True).backward()
"""Autograd starts here, without a thread: behind a capture it starts eight, and no process can be forked any more."""


def make_groups(shape):
    """A mesh over all ranks, last dim fastest; its groups are made where they are first used."""
    return MeshGroups(torch.arange(dist.get_world_size()).reshape(shape))


def random_plan(graph, mesh, seed):
    draw = random.Random(seed)
    decisions = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
    for parts in mesh:
        chosen = {n: draw.choice(node.choices(parts, decisions.cuts(n))) for n, node in graph.nodes.items()}
        decisions = decisions.extend(parts, chosen)
    return OperatorPlan(decisions, "random", (), 0.0)


class Counter:
    """Bytes from the buffers that reach torch.distributed, apart from the executor's own count.

    A ring's all-reduce passes on every chunk of the real buffer but one, in each of its two phases; where chunks are
    uneven, the average rank counts.
    """

    sent = 0

    def install(self):
        def size(tensor):
            return tensor.numel() * tensor.element_size()

        def counted(name, sent):
            real = getattr(dist, name)

            def call(*given, group=None):
                self.sent += sent(group, *given)
                return real(*given, group=group)

            setattr(dist, name, call)

        def reduced(group, tensor):
            number = dist.get_world_size(group)
            return 2 * (number - 1) * size(tensor) // number

        def gathered(group, outputs, tensor):
            return sum(size(o) for rank, o in enumerate(outputs) if rank != dist.get_rank(group))

        counted("all_gather", gathered)
        counted("all_reduce", reduced)
        counted("reduce_scatter_tensor", lambda group, output, tensor: size(tensor) - size(output))
        counted("all_to_all_single", lambda group, o, t: size(t) - size(t) // dist.get_world_size(group))


COUNTER = Counter()


def compare(model, values, captured, plan, mesh):
    """Give the worst relative error of outputs and gradients, and whether bytes sent are those predicted."""
    planned = PlannedModule(captured, plan, model, mesh)
    model.zero_grad()
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(7)
    expected = results(called(model, values))
    backward(expected)
    updated = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    torch.manual_seed(7)
    mesh.sent_bytes = COUNTER.sent = 0
    mesh.bytes_beyond_plan = 0
    found = results(called(planned, values))
    forward, counted = mesh.sent_bytes - mesh.bytes_beyond_plan, COUNTER.sent - mesh.bytes_beyond_plan
    mesh.bytes_beyond_plan = mesh.sent_bytes = COUNTER.sent = 0
    backward(found)
    sent = [forward, mesh.sent_bytes], [counted, COUNTER.sent]
    assert len(found) == len(expected)
    worst = max((relative(f.detach(), e.detach()) for f, e in zip(found, expected, strict=True)), default=0.0)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            mine = planned.piece_of(name).grad
            if mine is None:  # nothing flows, where the module's own backward passes on zeros
                mine = torch.zeros_like(planned.piece_of(name))
            whole = mesh.piece(parameter.grad, plan.decisions.output_placements(name))
            worst = max(worst, relative(mine, whole, parameter.grad))
    for name in captured.updates:
        if updated[name].is_floating_point():
            placements = plan.decisions.output_placements(name) if name in captured.graph.nodes else ()
            piece = mesh.piece(updated[name], placements)
            worst = max(worst, relative(planned.piece_of(name), piece, updated[name]))
    predicted = [sum(column) for column in zip(*plan.edge_bytes().values(), strict=True)]
    return worst, sent[0] == sent[1] == predicted, predicted, sent


def called(module, values):
    """Call with copies of ``values``, by position or by name: some modules change their inputs."""
    if isinstance(values, dict):
        return module(**{name: value.clone() for name, value in values.items()})
    return module(*(value.clone() for value in values))


def results(made):
    """List what a module returns: its tensors of numbers."""
    tensors = [value for value in pytree.tree_leaves(made) if isinstance(value, torch.Tensor)]
    return [value for value in tensors if value.is_floating_point() or value.is_complex()]


def backward(made):
    terms = [value.abs().square().sum() for value in made if value.requires_grad]
    if terms:
        sum(terms).backward()


SMALLEST = 1e-3
"""Norms below this are differences of larger numbers: against them the error is absolute, over this."""


def relative(found, expected, whole=None):
    """Give the norm of the error over that of the reference: of the ``whole`` tensor where ``expected`` is a piece.

    Where both are infinite or no number at the same places, these are left out.
    """
    reference = expected if whole is None else whole
    if found.shape != expected.shape:
        return float("inf")
    finite, same = torch.isfinite(expected), torch.isfinite(found)
    if not bool((finite == same).all()):
        return float("inf")
    reference = reference[torch.isfinite(reference)]
    return float((found[finite] - expected[finite]).norm()) / max(SMALLEST, float(reference.norm()))
