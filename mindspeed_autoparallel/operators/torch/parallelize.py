"""A plan as styles for torch's ``parallelize_module``: one per module, if styles can express it.

Styles can gather, scatter and reduce at the entry and exit of modules; code between modules runs on the results. So
styles can express a plan only if nothing between modules is redistributed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, parallel

from mindspeed_autoparallel.operators.graph.node import NO_CUT, PARTIAL, REPLICATE, Node
from mindspeed_autoparallel.operators.graph.redistribution import gradient_of_output
from mindspeed_autoparallel.operators.lowering.uniform import CONTEXT, DATA, role_of_cut, votes, winners
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.recursive import carried_axes
from mindspeed_autoparallel.operators.torch.dry_run import refusal_of_shapes
from mindspeed_autoparallel.operators.torch.graph_builder import Captured

_MODULES = (torch.nn.Linear, torch.nn.Embedding)


@dataclass(frozen=True)
class ParallelizePlan:
    """``styles`` for ``parallelize_module(model, mesh["tp"], styles)``; the batch is divided by ``data_size`` replicas.

    If ``not_expressed`` is not empty, the styles alone would compute something else: each line names an operator.
    """

    styles: dict[str, parallel.ParallelStyle] = field(default_factory=dict)
    data_size: int = 1
    tensor_size: int = 1
    not_expressed: tuple[str, ...] = ()


def parallelize_plan(captured: Captured, model: torch.nn.Module, plan: OperatorPlan) -> ParallelizePlan:
    """Return the styles of ``plan``; ``model`` is the module that was captured.

    Mesh dims that divide samples become ``data_size`` (each replica gets its samples, gradients are averaged by the
    caller), the others one tensor-parallel dim. Parameters are cut as the operators read them.
    """
    return _Lowering(captured, model, plan).lower()


def nearest_styled(
    captured: Captured, model: torch.nn.Module, plan: OperatorPlan
) -> tuple[OperatorPlan, tuple[str, ...]]:
    """Undo cuts of ``plan`` that styles cannot express; return the new plan and the names of the changed operators.

    An operator that cannot be expressed becomes whole on the tensor-parallel mesh dims; if it is whole already, the
    operators that it reads become whole. This repeats until nothing changes.
    """
    changed: dict[str, None] = {}
    while True:
        lowering = _Lowering(captured, model, plan)
        lowering.lower()
        uncut = lowering.to_leave_whole() - set(changed)
        if not uncut:
            return plan, tuple(changed)
        changed.update(dict.fromkeys(sorted(uncut)))
        choices = dict(plan.decisions.choices)
        for name in uncut:
            choices[name] = tuple(
                axis if dim in lowering.data_dims else NO_CUT for dim, axis in enumerate(choices[name])
            )
        plan = replace(plan, decisions=replace(plan.decisions, choices=choices))


class _Lowering:
    def __init__(self, captured: Captured, model: torch.nn.Module, plan: OperatorPlan) -> None:
        self.captured, self.plan, self.graph, self.model = captured, plan, captured.graph, model
        self.reasons: dict[str, str] = {}
        self.batch = carried_axes(self.graph)
        leading = [winners(ballot)[:1] for ballot in votes(plan.decisions)]
        self.data_dims = {dim for dim, first in enumerate(leading) if first == [DATA]}
        self.modules = {name: module for name, module in model.named_modules() if isinstance(module, _MODULES)}
        self.owner = self._owners()
        self.from_inputs = set(captured.inputs)
        for name, node in self.graph.nodes.items():  # operators that do not depend on inputs need not be cut by samples
            if not self.from_inputs.isdisjoint(node.inputs):
                self.from_inputs.add(name)
        self.last = {module: node for node, module in self.owner.items()}
        self.choice: dict[str, int] = {}
        self.flowing: dict[str, int] = {}

    def lower(self) -> ParallelizePlan:
        mesh = self.plan.decisions.mesh
        data = math.prod(n for dim, n in enumerate(mesh) if dim in self.data_dims)
        for name, node in self.graph.nodes.items():
            self.choice[name] = NO_CUT if node.is_parameter else self._choice(node)
        for name, node in self.graph.nodes.items():
            self._flow(name, node)
        self._check_shared_weights()
        styles: dict[str, parallel.ParallelStyle] = {}
        for module in self.modules:
            style = self._style(module)
            if style is not None:
                styles[module] = style
        tensor = math.prod(mesh) // data
        if not self.reasons:
            self._check_sizes(styles, tensor, data)
        return ParallelizePlan({} if self.reasons else styles, data, tensor, tuple(self._reason_lines()))

    def _check_shared_weights(self) -> None:
        """Record a reason for cut weights that several operators read: styles would make them several weights."""
        for name, readers in self.graph.consumers().items():
            if self.graph.nodes[name].is_parameter and len(readers) > 1:
                for reader, _ in readers:
                    if reader in self.owner and self.choice[reader] != NO_CUT:
                        told = f"its weight {name} is read elsewhere, too; styles would make it two weights."
                        self.reasons.setdefault(reader, told)

    def _check_sizes(self, styles: dict[str, parallel.ParallelStyle], tensor: int, data: int) -> None:
        """Record a reason for a model whose code hard-codes the size of a cut dim."""
        refused = refusal_of_shapes(self.model, self.captured.example, styles, tensor, data)
        if refused:
            self.reasons["forward"] = (
                f"it does not run with one rank's shapes: {refused}. Write -1 for a size that is cut."
            )

    def to_leave_whole(self) -> set[str]:
        """Return the operators whose cut causes the reasons found."""
        found: set[str] = set()
        for name in self.reasons:
            node = self.graph.nodes.get(name)
            if node is None:
                continue
            tensor = [axis for dim, axis in enumerate(self.plan.decisions.choices[name]) if dim not in self.data_dims]
            if any(axis != NO_CUT for axis in tensor):
                found.add(name)
                continue
            for slot, source in enumerate(node.inputs):
                wanted = node.operand_placement(slot, self.choice[name])
                if wanted != self.flowing[source] and not self.graph.nodes[source].is_parameter:
                    found.add(source)
        return found

    def _reason_lines(self) -> Iterator[str]:
        """Yield one line per reason and role, so that repeated layers share a line."""
        alike: dict[tuple[str, str], list[str]] = {}
        for name, reason in self.reasons.items():
            node = self.graph.nodes.get(name)
            alike.setdefault((node.role if node and node.role else name, reason), []).append(name)
        for (_, reason), names in alike.items():
            more = f" (and {len(names) - 1} like it)" if len(names) > 1 else ""
            yield f"{names[0]}{more}: {reason}"

    def _owners(self) -> dict[str, str]:
        """Map operators inside modules that may have a style to their module: the product or look-up, and the bias."""
        found: dict[str, str] = {}
        for module in self.modules:
            for suffix in ("", ".embedding", ".bias_add"):
                if f"{module}{suffix}" in self.graph.nodes:
                    found[f"{module}{suffix}"] = module
            if f"{module}.linear_1" in self.graph.nodes or f"{module}.embedding_1" in self.graph.nodes:
                self.reasons[module] = "it is called more than once, and a module has one style."
        return found

    def _choice(self, node: Node) -> int:
        """Return the axis that all tensor-parallel mesh dims cut; data-parallel mesh dims must cut the batch."""
        chosen = self.plan.decisions.choices[node.name]
        for dim in self.data_dims:
            whole = chosen[dim] == NO_CUT and self.batch.get(node.name, NO_CUT) not in node.choices(2)
            constant = node.name not in self.from_inputs
            if node.inputs and not whole and not constant and chosen[dim] != self.batch.get(node.name, NO_CUT):
                self.reasons[node.name] = "it is not cut by its batch on a mesh dim that divides samples elsewhere."
        others = {axis for dim, axis in enumerate(chosen) if dim not in self.data_dims}
        if len(others) > 1:
            names = " and ".join(sorted("nothing" if axis == NO_CUT else node.axes[axis].name for axis in others))
            self.reasons[node.name] = f"it is cut by {names} on different mesh dims."
        axis = others.pop() if others else NO_CUT
        if not node.inputs:
            return NO_CUT  # inputs are whole
        if role_of_cut(node, axis, self.batch.get(node.name), 1, 1, 0) in (DATA, CONTEXT):
            self.reasons[node.name] = f"it is cut by {node.axes[axis].name} while other operators are cut by weights."
        return axis

    def _flow(self, name: str, node: Node) -> None:
        """Record the output placement of operator ``name``: its own or, for the last operator of a module, the one that
        readers need."""
        made = node.output_placement(self.choice[name])
        if name not in self.owner:
            self.flowing[name] = made
            self._check_between(name, node)
        elif self.last[self.owner[name]] != name:
            self.flowing[name] = made
        else:
            wanted = list(dict.fromkeys(self._wanted(name)))
            self.flowing[name] = wanted[0] if wanted else (REPLICATE if made == PARTIAL else made)
            if len(wanted) > 1:
                self.reasons[name] = "its readers need it in different cuts."

    def _wanted(self, name: str) -> Iterator[int]:
        """Yield the placements that the code after operator ``name`` needs; modules accept any placement."""
        for reader, slot in self.graph.consumers()[name]:
            if reader not in self.owner:
                yield self.graph.nodes[reader].operand_placement(slot, self.choice[reader])
        if name in self.captured.outputs:
            yield REPLICATE

    def _check_between(self, name: str, node: Node) -> None:
        """Check that code between modules needs no redistribution and leaves no pending sum."""
        for slot, source in enumerate(node.inputs):
            wanted = node.operand_placement(slot, self.choice[name])
            if wanted != self.flowing[source]:
                self.reasons[name] = f"it needs {source} in another cut than its producer's, and no module is between."
            elif self.graph.nodes[source].needs_gradient:
                gradient = node.gradient_placement(slot, self.choice[name])
                if (gradient,) != gradient_of_output((wanted,)):
                    self.reasons[name] = f"it leaves the gradient of {source} as a pending sum."
        if name in self.captured.outputs and node.output_placement(self.choice[name]) != REPLICATE:
            self.reasons[name] = "the model would return a piece of it."

    def _style(self, module: str) -> parallel.ParallelStyle | None:
        main = next((name for name, owner in self.owner.items() if owner == module), None)
        if main is None:
            return None
        node, axis = self.graph.nodes[main], self.choice[main]
        source = next(s for s in node.inputs if not self.graph.nodes[s].is_parameter)
        arrives, leaves = _placement(self.flowing[source]), _placement(self.flowing[self.last[module]])
        name = "" if axis == NO_CUT else node.axes[axis].name
        if name in ("columns", "hidden"):
            return parallel.ColwiseParallel(input_layouts=arrives, output_layouts=leaves)
        if name in ("inner", "table"):
            return parallel.RowwiseParallel(input_layouts=arrives, output_layouts=leaves)
        if arrives != Replicate() and leaves != Replicate():
            self.reasons[main] = "it is whole between cut tensors."
        if arrives != Replicate():
            return parallel.PrepareModuleInput(
                input_layouts=arrives, desired_input_layouts=Replicate(), use_local_output=True
            )
        if leaves != Replicate():
            return parallel.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=leaves)
        return None


def _placement(placement: int) -> Placement:
    return Replicate() if placement == REPLICATE else Partial() if placement == PARTIAL else Shard(placement)
