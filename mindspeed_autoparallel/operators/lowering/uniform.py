"""One role per mesh dim for the whole model: the cuts of every operator by Megatron's sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mindspeed_autoparallel.operators.graph.node import NO_CUT, PARTIAL, Graph, Node
from mindspeed_autoparallel.operators.search.recursive import carried_axes
from mindspeed_autoparallel.operators.search.state import Decisions


def uniform_decisions(
    graph: Graph, mesh: Sequence[int], roles: Sequence[str], *, sequence_parallel: bool, expert_dims: Sequence[int] = ()
) -> Decisions:
    """Return every operator cut as Megatron cuts it when mesh dim ``d`` has ``roles[d]``.

    ``data`` cuts samples, and experts in ``expert_dims``. ``context`` cuts tokens, and fused attention by heads (the
    all-to-all form). ``tensor`` cuts a product that reads a whole tensor by its columns, and one that reads a cut
    tensor by its inner axis; with ``sequence_parallel`` the operators between are cut by tokens.
    """
    batch, tokens = carried_axes(graph), carried_axes(graph, 1)
    decisions = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
    for dim, (parts, role) in enumerate(zip(mesh, roles, strict=True)):
        cut = _Cut(decisions, parts, batch, {**batch, **tokens})
        for node in graph.nodes.values():
            if not node.is_parameter:
                cut.chosen[node.name] = cut.choose(node, role, dim in expert_dims, sequence_parallel)
        cut.follow_with_parameters()
        decisions = decisions.extend(parts, cut.chosen)
    return decisions


class _Cut:
    """The choices of one mesh dim, made in the order of the graph."""

    def __init__(self, decisions: Decisions, parts: int, batch: dict[str, int], tokens: dict[str, int]) -> None:
        self.decisions, self.parts, self.batch, self.tokens = decisions, parts, batch, tokens
        self.chosen: dict[str, int] = {}

    def choose(self, node: Node, role: str, by_expert: bool, sequence_parallel: bool) -> int:
        allowed = node.choices(self.parts, self.decisions.cuts(node.name))
        if role == TENSOR:
            wanted = self._tensor(node, allowed, sequence_parallel)
        elif role == CONTEXT:
            heads = next((a for a, axis in enumerate(node.axes) if axis.name == "heads"), NO_CUT)
            wanted = heads if node.kind == "attention" else self.tokens.get(node.name, NO_CUT)
        else:
            assert role == DATA, role
            experts = next((a for a, axis in enumerate(node.axes) if axis.name == "experts"), NO_CUT)
            in_groups = by_expert and experts != NO_CUT and node.kind not in ("dispatch", "combine")
            wanted = experts if in_groups else self.batch.get(node.name, NO_CUT)
        return wanted if wanted in allowed else NO_CUT

    def _tensor(self, node: Node, allowed: list[int], sequence_parallel: bool) -> int:
        if not node.inputs or node.kind == "router":
            return NO_CUT
        table = next((a for a, axis in enumerate(node.axes) if axis.name == "table"), NO_CUT)
        if table in allowed and table != NO_CUT:
            return table
        if node.matmul:
            _, columns, inner = node.matmul
            return inner if inner in allowed and inner in self._arriving(node)[:1] else columns
        arriving = [axis for axis in self._arriving(node) if axis is not None and axis in allowed]
        rows = self.tokens.get(node.name, NO_CUT)
        for axis in arriving:
            if axis != rows:
                return axis
        pending = any(
            source in self.chosen and self._node(source).output_placement(self.chosen[source]) == PARTIAL
            for source in node.inputs
        )
        return rows if sequence_parallel and (arriving or pending) else NO_CUT

    def _arriving(self, node: Node) -> list[int | None]:
        """Return, for each input except parameters, the axis of ``node`` that its cut implies; None for a whole one."""
        found: list[int | None] = []
        for slot, source in enumerate(node.inputs):
            if source in self.chosen:
                placement = self._node(source).output_placement(self.chosen[source])
                found.append(node.operands[slot][placement] if placement >= 0 else None)
        return found

    def _node(self, name: str) -> Node:
        return self.decisions.graph.nodes[name]

    def follow_with_parameters(self) -> None:
        """Cut every parameter as its first reader needs it."""
        for node in self.decisions.graph.nodes.values():
            for slot, source in enumerate(node.inputs):
                if self._node(source).is_parameter and source not in self.chosen:
                    wanted = node.operand_placement(slot, self.chosen[node.name])
                    allowed = self._node(source).choices(self.parts, self.decisions.cuts(source))
                    self.chosen[source] = wanted if wanted in allowed else NO_CUT
        for name in self.decisions.graph.nodes:
            self.chosen.setdefault(name, NO_CUT)


DATA, TENSOR, CONTEXT, EXPERT, IDLE = "data", "tensor", "context", "expert", "idle"
"""What the role divides: samples, weights, tokens of one sample, whole experts, or nothing."""


def role_of_cut(node: Node, axis: int, batch: int | None, earlier_parts: int, parts: int, samples: int) -> str:
    """Return the role of cutting ``axis``; ``batch``: the axis that carries the samples, cut into ``earlier_parts`` so
    far.

    If rows are samples times tokens, they hold whole samples until there are as many parts as ``samples``.
    """
    if axis == NO_CUT:
        return IDLE
    if node.axes[axis].name == "experts":
        return EXPERT
    if axis == batch:
        return DATA if samples == 0 or samples % (earlier_parts * parts) == 0 else CONTEXT
    if node.axes[axis].name.startswith("rows") or node.axes[axis].name == "sequence":
        return CONTEXT
    return TENSOR


def votes(decisions: Decisions, num_microbatches: int = 1) -> list[dict[str, float]]:
    """Return for each mesh dim the share of all FLOPs that each role has; an unused role is not listed.

    With several microbatches, only the samples of one of them can be divided.
    """
    graph = decisions.graph
    samples = samples_at_once(graph, num_microbatches)
    batch = carried_axes(graph)
    total = sum(node.flops for node in graph.nodes.values()) or 1
    result: list[dict[str, float]] = [{} for _ in decisions.mesh]
    for name, node in graph.nodes.items():
        if not node.flops:
            continue
        for dim, (axis, parts) in enumerate(zip(decisions.choices[name], decisions.mesh, strict=True)):
            before = zip(decisions.choices[name][:dim], decisions.mesh, strict=False)
            earlier = math.prod(count for cut, count in before if cut == axis)
            role = role_of_cut(node, axis, batch.get(name), earlier, parts, samples)
            result[dim][role] = result[dim].get(role, 0.0) + node.flops / total
    return result


def samples_at_once(graph: Graph, num_microbatches: int) -> int:
    """Return the samples of one microbatch of all replicas; all samples if the number does not divide them."""
    return graph.samples if graph.samples % num_microbatches else graph.samples // num_microbatches


def attention_limits(graph: Graph) -> tuple[int, int]:
    """Return (samples, heads) that all fused attentions can be cut into; 0 if the graph has none."""
    found: dict[str, list[int]] = {"batch": [], "heads": []}
    for node in graph.nodes.values():
        if node.kind == "attention":
            for axis in node.axes:
                for name, sizes in found.items():
                    if axis.name.startswith(name):
                        sizes.append(axis.size)
    return graph.samples or math.gcd(*found["batch"]), math.gcd(*found["heads"])


def winners(ballot: Mapping[str, float]) -> list[str]:
    """Return roles from most to least votes; ties go in the order of their definition."""
    order = (DATA, TENSOR, CONTEXT, EXPERT, IDLE)
    return sorted(ballot, key=lambda role: (-ballot[role], order.index(role)))
