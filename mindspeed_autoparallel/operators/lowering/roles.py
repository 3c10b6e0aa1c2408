"""The role of a mesh dim in the whole model, by the vote of its operators' cut axes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mindspeed_autoparallel.operators.graph.node import NO_CUT, Graph, Node
from mindspeed_autoparallel.operators.search.recursive import carried_axes
from mindspeed_autoparallel.operators.search.state import Decisions

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
