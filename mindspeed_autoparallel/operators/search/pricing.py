"""Prices of one operator and of one redistribution, which the searches minimise: microseconds, bytes and shares."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_autoparallel.operators.graph.node import PARTIAL, REPLICATE, Graph, Node
from mindspeed_autoparallel.operators.graph.redistribution import Placements, gradient_of_output, moved_bytes
from mindspeed_autoparallel.operators.search.state import Decisions

STATE_BYTES = 12
"""A gradient and Adam's two moments in fp32, per trained element; a parameter below fp32 also has a master copy."""
MASTER_BYTES = 4


@dataclass(frozen=True)
class Machine:
    """Rates that turn work into time. Defaults: a 300 TFLOP/s device, 1.6 TB/s memory, 100 GB/s links."""

    flops_per_us: float = 3.0e8
    memory_bytes_per_us: float = 1.6e6
    link_bytes_per_us: float = 1.0e5


def work_us(graph: Graph, node: Node, machine: Machine) -> float:
    """Return the time of the whole operator on one device: forward, and a backward for each operand that gets a
    gradient.

    A product of two operands costs once more per gradient; any other operator twice more if any gradient flows.
    """
    if not node.inputs:
        return 0.0
    flowing = sum(graph.flows_back(source, node.name, slot) for slot, source in enumerate(node.inputs))
    times = 1 + (min(flowing, 2) if node.matmul else 2 * (flowing > 0))
    forward = node.flops / machine.flops_per_us + 2 * node.output_bytes / machine.memory_bytes_per_us
    return times * forward


def pending_us(graph: Graph, node: Node, choice: int, parts: int, divided: int, machine: Machine) -> float:
    """Return the time to reduce the pending sums of ``choice``: the output, and gradients of inputs other than
    parameters.

    ``divided``: number of parts into which earlier cuts divide the operator.
    """
    sizes = [node.output_bytes] if node.output_placement(choice) == PARTIAL else []
    for slot, source in enumerate(node.inputs):
        given = graph.nodes[source]
        if graph.flows_back(source, node.name, slot) and not given.is_parameter:
            sizes += [given.output_bytes] * (node.gradient_placement(slot, choice) == PARTIAL)
    moved = sum(moved_bytes((PARTIAL,), (REPLICATE,), (size // divided,), 1, (parts,)) for size in sizes)
    return moved / machine.link_bytes_per_us


def edge_bytes(
    producer: Node, made: Placements, wanted: Placements, back: Placements | None, mesh: tuple[int, ...]
) -> tuple[int, int]:
    """Return bytes one device sends to take ``producer``'s output from ``made`` to ``wanted``, and its gradient home.

    ``back``: placement in which the reader leaves the gradient, None without one.
    """
    forward = moved_bytes(made, wanted, producer.output_shape, producer.item_bytes, mesh)
    if back is None:
        return forward, 0
    home = gradient_of_output(made)
    return forward, moved_bytes(back, home, producer.output_shape, producer.item_bytes, mesh)


def resident_bytes(graph: Graph, node: Node, num_microbatches: float = 1) -> float:
    """Return bytes the whole operator keeps through a step: a parameter with its states, or an output kept for
    backward.

    An output is divided by ``num_microbatches`` (by a smaller number if several are in flight), and counts only for an
    operator with a gradient. Nothing is recomputed.
    """
    if node.is_parameter:
        if not node.needs_gradient:
            return node.output_bytes
        states = STATE_BYTES + (MASTER_BYTES if node.item_bytes < 4 else 0)
        return node.output_bytes + math.prod(node.output_shape) * states
    if not node.inputs or not node.needs_gradient:
        return 0.0
    return node.output_bytes / num_microbatches


def plan_resident_bytes(decisions: Decisions, num_microbatches: float = 1) -> float:
    """Return the sum of ``resident_bytes`` over the pieces of one device."""
    return sum(
        resident_bytes(decisions.graph, node, num_microbatches) / math.prod(n for _, n in decisions.cuts(name))
        for name, node in decisions.graph.nodes.items()
    )


def parameter_bytes(decisions: Decisions) -> int:
    """Return the bytes of one device's weights."""
    return sum(
        node.output_bytes // math.prod(n for _, n in decisions.cuts(name))
        for name, node in decisions.graph.nodes.items()
        if node.is_parameter
    )
