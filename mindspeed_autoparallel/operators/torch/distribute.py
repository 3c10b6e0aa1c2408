"""A plan in the form of torch's ``distribute_module``: parameters as DTensors, redistributions fixed by the plan.

For plans that styles cannot express. The module keeps its class, names and inputs; its parameters become DTensors,
which optimizers and distributed checkpoints support, and its forward runs the captured operators on local pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import NO_CUT, REPLICATE, Graph, Node
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.state import Decisions
from mindspeed_autoparallel.operators.torch.compare import compare
from mindspeed_autoparallel.operators.torch.distributed_forward import DistributedForward, Variant
from mindspeed_autoparallel.operators.torch.graph_builder import Captured
from mindspeed_autoparallel.operators.torch.planned import PlannedModule
from mindspeed_autoparallel.operators.torch.redistribute import MeshGroups, groups_of


def distribute_plan(
    captured: Captured,
    plan: OperatorPlan,
    model: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    also: Sequence[Captured] = (),
    loader_dims: Sequence[int] = (),
) -> torch.nn.Module:
    """Distribute ``model``, the module that was captured, by ``plan`` over ``mesh``, in place; every rank calls it.

    All ranks must hold the same values. Without ``loader_dims``, inputs and results are whole on every rank. With them,
    ranks along these mesh dims load different samples: each passes its share of the captured batch (first dim) and gets
    the results of its samples; gradients are those of the mean of their losses. Gradients of parameters are DTensors in
    the placements of the plan.

    ``also``: further captures of ``model`` (evaluation mode, a smaller last batch, another length), which run with the
    plan's cuts wherever these divide. Raises ``ConfigError`` if plan, captures and mesh do not fit together.
    """
    if tuple(mesh.shape) != plan.decisions.mesh:
        raise ConfigError(f"the plan is for a mesh of {plan.decisions.mesh}, but this mesh is {tuple(mesh.shape)}.")
    arrival = _arrival(mesh, loader_dims)
    groups = groups_of(mesh)
    variants = []
    for each in (captured, *also):
        if not each.is_compared:
            compare(each, model)
        own = plan if each is captured else same_cuts(plan, each.graph)
        variants.append(Variant(each, PlannedModule(each, own, model, groups)))
    placed = _Placed(captured, plan, model, groups)
    made = distribute_module(model, mesh, placed.distribute)
    made.forward = DistributedForward(variants, placed.made, made, arrival)
    return made


def same_cuts(plan: OperatorPlan, graph: Graph) -> OperatorPlan:
    """Return a plan of ``graph`` that cuts each operator like its namesake in ``plan``; what cannot be cut stays whole.

    Raises ``ConfigError`` for a parameter that cannot be cut alike.
    """
    before, made = plan.decisions, Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
    for dim, parts in enumerate(before.mesh):
        chosen = {}
        for name, node in graph.nodes.items():
            same = before.graph.nodes.get(name)
            choice = before.choices[name][dim] if same is not None and _alike(same, node) else NO_CUT
            if choice not in node.choices(parts, made.cuts(name)):
                if node.is_parameter:
                    raise ConfigError(f"the captures differ in parameter {name}: they are not of one module.")
                choice = NO_CUT
            chosen[name] = choice
        made = made.extend(parts, chosen)
    return dataclasses.replace(plan, decisions=made)


def _alike(first: Node, second: Node) -> bool:
    names = [[axis.name for axis in node.axes] for node in (first, second)]
    return first.kind == second.kind and names[0] == names[1]


def _arrival(mesh: DeviceMesh, loader_dims: Sequence[int]) -> tuple[int, ...]:
    """Return the placement of a batch whose samples differ along ``loader_dims``; empty if inputs are whole."""
    wrong = [dim for dim in loader_dims if not 0 <= dim < mesh.ndim]
    if wrong:
        raise ConfigError(f"loader_dims has {wrong[0]}, and the mesh has dims 0 to {mesh.ndim - 1}.")
    return tuple(0 if dim in loader_dims else REPLICATE for dim in range(mesh.ndim)) if loader_dims else ()


class _Placed:
    """The parameters and buffers of a module under their first names, and the distributed parameters."""

    def __init__(self, captured: Captured, plan: OperatorPlan, model: torch.nn.Module, groups: MeshGroups) -> None:
        self.captured, self.plan, self.groups = captured, plan, groups
        self.first: dict[int, str] = {}
        self.values = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for name, value in self.values:
            self.first.setdefault(id(value), name)
        self.made: dict[str, torch.nn.Parameter] = {}

    def distribute(self, _: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        """Replace the parameters of one module; a weight with two names stays one parameter."""
        for key, value in list(module.named_parameters(recurse=False)):
            if isinstance(value, DTensor):
                continue
            name = self.first[id(value)]
            if name not in self.made:
                placements = self._placements(name, len(mesh.shape))
                piece = self.groups.piece(value.detach(), placements)
                where = [_placement(p) for p in placements]
                made = DTensor.from_local(piece, mesh, where, run_check=False, shape=value.shape, stride=value.stride())
                self.made[name] = torch.nn.Parameter(made, value.requires_grad)
            module.register_parameter(key, self.made[name])

    def _placements(self, name: str, dims: int) -> tuple[int, ...]:
        if name in self.captured.graph.nodes:
            return self.plan.decisions.output_placements(name)
        return (-1,) * dims


def _placement(placement: int) -> Placement:
    return Shard(placement) if placement >= 0 else Replicate()
