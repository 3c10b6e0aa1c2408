"""The second half of recursive programming: strategies of matrix products spread to all other operators."""

from __future__ import annotations

import math
from collections.abc import Collection

from mindspeed_autoparallel.operators.graph.node import NO_CUT, Graph, Node
from mindspeed_autoparallel.operators.graph.redistribution import Placements
from mindspeed_autoparallel.operators.search.state import Decisions

Strategy = tuple[int, ...]


def fill_rest(main: Decisions, decided: Collection[str]) -> Decisions:
    """Return ``main`` with a strategy for every operator; those in ``decided`` keep theirs.

    Forward and backward passes alternate until nothing changes. They first spread only strategies that use all N
    devices, then N / 2, and so on, then any. An axis that cannot be divided, or must not be cut (norm, softmax), stays
    whole. A gather that no strategy reaches cuts its index first, then the rows of its table; any other such operator
    stays whole.
    """
    graph, mesh = main.graph, main.mesh
    found = {name: main.choices[name] for name in graph.nodes if name in decided}
    least = math.prod(mesh)
    while True:
        _spread(graph, mesh, found, least)
        if least == 1:
            break
        least = max(1, least // min(mesh))
    for name, node in graph.nodes.items():
        if name not in found:
            found[name] = _own(node, mesh)
    return Decisions(graph, mesh, found)


def _spread(graph: Graph, mesh: Strategy, found: dict[str, Strategy], least: int) -> None:
    consumers = graph.consumers()
    nodes = list(graph.nodes.values())
    changed = True
    while changed:
        before = len(found)
        for node in nodes:
            for slot, source in enumerate(node.inputs):
                if node.name not in found and source in found and not graph.nodes[source].is_parameter:
                    arriving = tuple(graph.nodes[source].output_placement(c) for c in found[source])
                    _adopt(node, node.operands[slot], arriving, mesh, found, least)
        for node in reversed(nodes):
            for name, slot in consumers[node.name]:
                if node.name not in found and name in found:
                    wanted = tuple(graph.nodes[name].operand_placement(slot, c) for c in found[name])
                    _adopt(node, node.output, wanted, mesh, found, least)
        changed = len(found) > before


def _adopt(
    node: Node,
    dims: tuple[int | None, ...],
    placements: Placements,
    mesh: Strategy,
    found: dict[str, Strategy],
    least: int,
) -> None:
    """Adopt ``placements`` of a tensor with axes ``dims`` if that uses ``least`` devices."""
    strategy = _strategy(node, mesh, [(dims[p],) if 0 <= p < len(dims) else () for p in placements])
    if math.prod(n for n, choice in zip(mesh, strategy, strict=True) if choice != NO_CUT) >= least:
        found[node.name] = strategy


def _strategy(node: Node, mesh: Strategy, wishes: list[tuple[int | None, ...]]) -> Strategy:
    """Return for each mesh dim the first preferred axis that can be divided there, or no cut."""
    strategy: list[int] = []
    for parts, wanted in zip(mesh, wishes, strict=True):
        cuts = [(axis, n) for axis, n in zip(strategy, mesh, strict=False) if axis != NO_CUT]
        allowed = node.choices(parts, cuts)
        strategy.append(next((axis for axis in wanted if axis is not None and axis in allowed), NO_CUT))
    return tuple(strategy)


def _own(node: Node, mesh: Strategy) -> Strategy:
    wanted: tuple[int, ...] = ()
    if node.kind == "gather":
        wanted = tuple(a for a, axis in enumerate(node.axes) if a == 0 or axis.name == "table")
    return _strategy(node, mesh, [wanted] * len(mesh))
