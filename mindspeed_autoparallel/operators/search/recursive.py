"""Recursive programming: each cut chooses I, J, K or none for the matrix products; ``fill`` spreads it to the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.operators.graph.node import NO_CUT, Graph, Node
from mindspeed_autoparallel.operators.search.matmul_cut import CutCosts, cut_costs
from mindspeed_autoparallel.operators.search.state import Decisions

REDISTRIBUTION_WEIGHT = 16
"""Cost per element of a tensor whose two ends are cut differently."""

_CUTS: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    "I": ((2, 1), (1, 1), (2, 1)),
    "J": ((1, 1), (1, 2), (1, 2)),
    "K": ((1, 2), (2, 1), (1, 1)),
    "none": ((1, 1), (1, 1), (1, 1)),
}
"""Cut vectors of A(i,k), B(k,j) and C(i,j)."""


@dataclass(frozen=True)
class ExplainedCut:
    """One decision of the search: the operator, the index of the cut (0 is the first), and its costs."""

    operator: str
    cut: int
    costs: CutCosts
    taken: str = "none"
    """The cut that was made: the cheapest if its axis can be divided, or the pinned axis."""


Neighbours = tuple[Collection[str], int, int]
"""Products connected to one by a tensor: their names (a tuple for a single later one), and the index of that tensor in
this product and in theirs; 0 is A, 1 is B and 2 is C."""


def main_neighbours(graph: Graph, *, later: bool = True) -> dict[str, list[Neighbours]]:
    """List the matrix products that each one reaches through other operators; without ``later`` only earlier ones.

    On a residual stream every product reaches all earlier ones. Groups share collections, so that the number of listed
    groups grows with the graph and not with its square.
    """
    reach: dict[str, dict[str, None]] = {}
    result: dict[str, list[Neighbours]] = {n.name: [] for n in graph.nodes.values() if n.matmul}
    for node in graph.nodes.values():
        if node.matmul is None:
            reached = [reach[source] for source in node.inputs if reach[source]]
            reach[node.name] = reached[0] if len(reached) == 1 else {m: None for group in reached for m in group}
            continue
        reach[node.name] = {node.name: None}
        for slot, source in enumerate(node.inputs[:2]):
            if reach[source]:
                result[node.name].append((reach[source], slot, 2))
            for other in reach[source] if later else ():
                result[other].append(((node.name,), 2, slot))
    return result


def _sizes(node: Node, decisions: Decisions) -> tuple[int, int, int]:
    assert node.matmul is not None
    cuts = decisions.cuts(node.name)
    rows, j, k = node.matmul
    return math.prod(node.local_size(axis, cuts) for axis in rows), node.local_size(j, cuts), node.local_size(k, cuts)


def carried_axes(graph: Graph, dim: int = 0) -> dict[str, int]:
    """Map each operator to the axis that carries dim ``dim`` of the model's inputs, the batch for 0.

    Of several row dims of a product (as in a captured module with the sequence first), the batch is cut first, since
    attention can follow it.
    """
    result: dict[str, int] = {}
    for node in graph.nodes.values():
        if node.kind == "input" and len(node.axes) > dim:
            result[node.name] = dim
        for slot, source in enumerate(node.inputs):
            at = graph.nodes[source].output_placement(result[source]) if source in result else -1
            axis = node.operands[slot][at] if at >= 0 else None
            if axis is not None and node.axes[axis].cuttable:
                result.setdefault(node.name, axis)
    return result


def row_axes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Map operators to the axes that hold rows: the row dims of a product, or the axis that carries the batch."""
    carried = {name: (axis,) for name, axis in carried_axes(graph).items()}
    return {**carried, **{name: node.matmul[0] for name, node in graph.nodes.items() if node.matmul}}


def _axis_of(node: Node, cut: str, cuts: tuple[tuple[int, int], ...], parts: int, first: int | None) -> int | None:
    assert node.matmul is not None
    rows, j, k = node.matmul
    rows = tuple(sorted(rows, key=lambda axis: axis != first))
    wanted = {"I": rows, "J": (j,), "K": (k,), "none": (NO_CUT,)}[cut]
    return next((axis for axis in wanted if axis in node.choices(parts, cuts)), None)


def _cut_of(node: Node, axis: int) -> str:
    assert node.matmul is not None
    rows, j, k = node.matmul
    return "I" if axis in rows else "J" if axis == j else "K" if axis == k else "none"


def _rest_costs(
    neighbours: Sequence[Neighbours],
    volumes: tuple[int, int, int],
    decided: Mapping[str, str],
    counted: dict[int, Counter[str | None]] | None,
) -> tuple[float, float, float, float]:
    """Return the redistribution from and to decided neighbours for each of ``_CUTS``.

    ``counted``: cache of the cuts of shared groups, if all of them are decided; None: count them each time.
    """
    rest = [0.0, 0.0, 0.0, 0.0]
    for others, mine, theirs in neighbours:
        if isinstance(others, tuple):
            counts: Mapping[str | None, int] = {decided.get(others[0]): 1}
        elif counted is None:
            counts = Counter(map(decided.get, others))
        else:
            if id(others) not in counted:
                counted[id(others)] = Counter(map(decided.get, others))
            counts = counted[id(others)]
        for theirs_cut, number in counts.items():
            if theirs_cut is not None:
                wanted, cost = _CUTS[theirs_cut][theirs], number * REDISTRIBUTION_WEIGHT * volumes[mine]
                for index, vectors in enumerate(_CUTS.values()):
                    rest[index] += cost if vectors[mine] != wanted else 0
    return rest[0], rest[1], rest[2], rest[3]


def cut_main_operators(
    decisions: Decisions,
    mem_coeff: float,
    pins: Mapping[str, int],
    neighbours: Mapping[str, Sequence[Neighbours]],
    *,
    by_weight: bool,
    most_row_parts: int | None,
) -> tuple[dict[str, int], list[ExplainedCut]]:
    """Return the choices of this cut for the matrix products, and the costs of each.

    ``by_weight`` decides the largest operator first, and requires later products in ``neighbours``. Rows are cut into
    at most ``most_row_parts``.
    """
    graph = decisions.graph
    order = [graph.nodes[name] for name in neighbours]
    sizes = {node.name: _sizes(node, decisions) for node in order}
    if by_weight:
        order.sort(key=lambda node: -max(sizes[node.name]))
    batch = carried_axes(graph)
    decided: dict[str, str] = {}
    counted: dict[int, Counter[str | None]] = {}
    chosen: dict[str, int] = {}
    explained = []
    for node in order:
        i, j, k = sizes[node.name]
        volumes = (i * k, k * j, i * j)
        rest = _rest_costs(neighbours[node.name], volumes, decided, None if by_weight else counted)
        before = {_cut_of(node, axis) for axis, _ in decisions.cuts(node.name)}
        row_parts = math.prod(n for axis, n in decisions.cuts(node.name) if _cut_of(node, axis) == "I")
        costs = cut_costs(
            i,
            j,
            k,
            mem_coeff,
            rest=rest,
            j_is_cut="J" in before,
            k_is_cut="K" in before,
            i_is_allowed=most_row_parts is None or 2 * row_parts <= most_row_parts,
        )
        cuts = decisions.cuts(node.name)
        if node.name in pins:
            axis: int | None = pins[node.name]
        else:
            # The row sizes can have an even product with no even axis that may be cut: then nothing is cut.
            axis = _axis_of(node, costs.choice, cuts, 2, batch.get(node.name))
        chosen[node.name] = NO_CUT if axis is None else axis
        decided[node.name] = _cut_of(node, chosen[node.name])
        explained.append(ExplainedCut(node.name, len(decisions.mesh), costs, decided[node.name]))
    return chosen, explained


def cut_all_products(
    graph: Graph,
    pins: Sequence[Mapping[str, int]],
    mem_coeff: float,
    *,
    by_weight: bool = False,
    most_row_parts: int | None = None,
) -> tuple[Decisions, list[ExplainedCut], set[str]]:
    """Halve only the matrix products and pinned operators; return decisions, their costs, and the decided operators.

    ``pins``: per mesh dim, the axis of every pinned operator.
    """
    decisions = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
    explained: list[ExplainedCut] = []
    nothing = dict.fromkeys(graph.nodes, NO_CUT)
    decided: set[str] = set()
    neighbours = main_neighbours(graph, later=by_weight)
    for fixed in pins:
        chosen, costs = cut_main_operators(
            decisions, mem_coeff, fixed, neighbours, by_weight=by_weight, most_row_parts=most_row_parts
        )
        decided |= {*chosen, *fixed}
        explained += costs
        decisions = decisions.extend(2, {**nothing, **chosen, **fixed})
    return decisions, explained, decided
