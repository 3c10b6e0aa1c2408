"""One cut of the whole graph as a problem of choices: a cost per choice and a cost per pair on each edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy

from mindspeed_autoparallel.operators.graph.node import NO_CUT, Graph, Node
from mindspeed_autoparallel.operators.graph.redistribution import Placements
from mindspeed_autoparallel.operators.search.pricing import Machine, edge_bytes, pending_us, resident_bytes, work_us
from mindspeed_autoparallel.operators.search.recursive import row_axes
from mindspeed_autoparallel.operators.search.state import Decisions

Matrix = numpy.ndarray


@dataclass(frozen=True)
class Reads:
    """Readers of one tensor, or of equal tensors of tied operators; readers with equal needs share a redistribution.

    ``readers``: variable, and for each of its choices the index of the placement it needs; ``cost_us[p, w]``: cost to
    take the tensor from the producer's choice ``p`` to need ``w``, both directions.
    """

    producer: int
    readers: tuple[tuple[int, Matrix], ...]
    cost_us: Matrix


def total_us(node_us: Sequence[Matrix], reads: Sequence[Reads], picks: Sequence[int]) -> float:
    """Return the price of ``picks``, a choice per variable; ``node_us``: that of each choice alone."""
    total = sum(float(node_us[v][p]) for v, p in enumerate(picks))
    for read in reads:
        wanted = {int(wants[picks[v]]) for v, wants in read.readers}
        total += sum(float(read.cost_us[picks[read.producer], w]) for w in wanted)
    return total


@dataclass
class CutProblem:
    """Variables are operators, or groups of tied ones; costs in microseconds, forward and backward together.

    ``reads`` are the redistributions; ``edges`` the same with separate costs for every reader, for the searches that
    decide one operator at a time.
    """

    parts: int
    members: list[list[str]] = field(default_factory=list)
    choices: list[list[int]] = field(default_factory=list)
    node_us: list[Matrix] = field(default_factory=list)
    pending_us: list[Matrix] = field(default_factory=list)
    """Time to reduce the sums that a choice leaves pending, without gradients of parameters. Not part of ``total_us``,
    which includes it in the redistributions."""
    parameter_bytes: list[Matrix] = field(default_factory=list)
    resident_bytes: list[Matrix] = field(default_factory=list)
    """Parameters with their states, and outputs kept for backward, on one device."""
    reads: list[Reads] = field(default_factory=list)
    edges: dict[tuple[int, int], Matrix] = field(default_factory=dict)

    def total_us(self, picks: list[int]) -> float:
        """Return the price of ``picks``, an index into ``choices`` per variable."""
        return total_us(self.node_us, self.reads, picks)

    def spread(self, picks: list[int]) -> dict[str, int]:
        """Return the choice of every operator from the pick of its variable."""
        return {name: self.choices[v][p] for v, p in enumerate(picks) for name in self.members[v]}

    def picks(self, chosen: Mapping[str, int]) -> list[int]:
        """Invert ``spread``; the first of tied operators gives the pick."""
        return [self.choices[v].index(chosen[names[0]]) for v, names in enumerate(self.members)]


def cut_by_cut(
    graph: Graph,
    mesh: Sequence[int],
    pins: Sequence[Mapping[str, int]],
    machine: Machine,
    pick: Callable[[int, CutProblem], list[int]],
    *,
    tied: bool,
    num_microbatches: int = 1,
    most_row_parts: int | None = None,
) -> Decisions:
    """Cut ``graph`` one mesh dim after another, each by the choice of ``pick`` for its problem; ``pins`` by mesh dim.

    Rows are cut into at most ``most_row_parts``.
    """
    rows = {} if most_row_parts is None else row_axes(graph)
    decisions = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
    for dim, parts in enumerate(mesh):
        kept = {
            name: axes
            for name, axes in rows.items()
            if parts * math.prod(n for axis, n in decisions.cuts(name) if axis in axes) > (most_row_parts or 0)
        }
        problem = build_problem(
            decisions, parts, machine, pins[dim], tied=tied, num_microbatches=num_microbatches, whole=kept
        )
        decisions = decisions.extend(parts, problem.spread(pick(dim, problem)))
    return decisions


def build_problem(
    decisions: Decisions,
    parts: int,
    machine: Machine,
    pins: Mapping[str, int],
    *,
    tied: bool,
    at: int | None = None,
    num_microbatches: int = 1,
    whole: Mapping[str, Collection[int]] | None = None,
) -> CutProblem:
    """Build the problem of one more cut into ``parts``, before mesh dim ``at`` or after all others.

    ``pins`` fixes operators; ``tied`` joins operators of equal role; ``whole``: axes of an operator that are not cut.
    """
    graph = decisions.graph
    problem = CutProblem(parts)
    shapes = shape_numbers(decisions)
    variable: dict[str, int] = {}
    groups: dict[object, int] = {}
    for name, node in graph.nodes.items():
        key = (node.role, node.kind, shapes[name], pins.get(name)) if tied and node.role else name
        if key not in groups:
            groups[key] = len(problem.members)
            allowed = [pins[name]] if name in pins else node.choices(parts, decisions.cuts(name))
            if whole and name in whole and name not in pins:
                allowed = [axis for axis in allowed if axis not in whole[name]]
            problem.members.append([])
            problem.choices.append(allowed)
            _add_operator(problem, decisions, node, machine, num_microbatches)
        variable[name] = groups[key]
        problem.members[groups[key]].append(name)
    for v, members in enumerate(problem.members):  # equal members have equal costs
        for held in (problem.node_us, problem.parameter_bytes, problem.resident_bytes):
            held[v] = held[v] * len(members)
    _add_reads(problem, decisions, machine, variable, len(decisions.mesh) if at is None else at)
    _add_edges(problem)
    return problem


def _add_operator(
    problem: CutProblem, decisions: Decisions, node: Node, machine: Machine, num_microbatches: int
) -> None:
    """Append the prices of ``node`` for every choice of its new variable."""
    graph, allowed, parts = decisions.graph, problem.choices[-1], problem.parts
    divided = math.prod(p for _, p in decisions.cuts(node.name))
    share = numpy.array([1 / (divided * (parts if c != NO_CUT else 1)) for c in allowed])
    problem.node_us.append(work_us(graph, node, machine) * share)
    problem.parameter_bytes.append((node.output_bytes if node.is_parameter else 0) * share)
    problem.resident_bytes.append(resident_bytes(graph, node, num_microbatches) * share)
    pending = [pending_us(graph, node, c, parts, divided, machine) for c in allowed]
    problem.pending_us.append(numpy.array(pending))


def shape_numbers(decisions: Decisions) -> dict[str, int]:
    """Number the operators; those that cost the same share a number, since comparing shapes is slow."""
    numbers: dict[object, int] = {}
    result = {}
    for name, node in decisions.graph.nodes.items():
        cut = decisions.choices[name]
        shape = (node.axes, node.operands, node.output, node.output_shape, node.item_bytes, node.flops, cut)
        result[name] = numbers.setdefault((shape, node.is_parameter, node.needs_gradient), len(numbers))
    return result


def _add_reads(
    problem: CutProblem, decisions: Decisions, machine: Machine, variable: Mapping[str, int], at: int
) -> None:
    """Add the redistributions of every tensor by all mesh dims, in groups of readers that can still have equal
    needs."""
    times: dict[object, int] = {}
    examples: dict[object, tuple[str, list[tuple[str, int]]]] = {}
    graph = decisions.graph
    for name, readers in graph.consumers().items():
        groups: dict[object, list[tuple[str, int]]] = {}
        for reader, slot in readers:
            groups.setdefault(decisions.wanted(name, reader, slot), []).append((reader, slot))
        for group in groups.values():
            key = (variable[name], tuple((variable[reader], slot) for reader, slot in group))
            times[key] = times.get(key, 0) + 1
            examples.setdefault(key, (name, group))
    costs: dict[object, Matrix] = {}
    mesh = (*decisions.mesh[:at], problem.parts, *decisions.mesh[at:])
    for group_key, (name, group) in examples.items():
        wants: dict[tuple[int, int | None], int] = {}
        wanted = []
        for reader, slot in group:
            node, v = graph.nodes[reader], variable[reader]
            flows = graph.flows_back(name, reader, slot)
            pairs = [
                (node.operand_placement(slot, c), node.gradient_placement(slot, c) if flows else None)
                for c in problem.choices[v]
            ]
            wanted.append((v, tuple(wants.setdefault(pair, len(wants)) for pair in pairs)))
        producer, (reader, slot) = graph.nodes[name], group[0]
        made = [producer.output_placement(c) for c in problem.choices[variable[name]]]
        ends = (decisions.output_placements(name), *decisions.wanted(name, reader, slot))
        same = (producer.output_shape, producer.item_bytes, tuple(made), tuple(wants), ends)
        if same not in costs:
            costs[same] = _sent_bytes(producer, made, list(wants), ends, mesh, at) / machine.link_bytes_per_us
        found = tuple((v, numpy.array(indices)) for v, indices in dict.fromkeys(wanted))
        problem.reads.append(Reads(variable[name], found, costs[same] * times[group_key]))


def _sent_bytes(
    producer: Node,
    made: list[int],
    wants: list[tuple[int, int | None]],
    ends: tuple[Placements, Placements, Placements | None],
    mesh: tuple[int, ...],
    at: int,
) -> Matrix:
    """Return the price of each pair of made (rows) and needed (columns) placements on mesh dim ``at``, in bytes.

    ``ends``: placements of the output, the need and its gradient on the other mesh dims.
    """

    def full(placements: Placements, placement: int) -> Placements:
        return (*placements[:at], placement, *placements[at:])

    output, operand, gradient = ends
    result = numpy.zeros((len(made), len(wants)))
    for p, placement in enumerate(made):
        for w, (want, back) in enumerate(wants):
            left = None if gradient is None or back is None else full(gradient, back)
            result[p, w] = sum(edge_bytes(producer, full(output, placement), full(operand, want), left, mesh))
    return result


def _add_edges(problem: CutProblem) -> None:
    """Add the separate cost of each reader, summed over edges between the same variables."""
    for read in problem.reads:
        for b, wants in read.readers:
            a = read.producer
            matrix = read.cost_us[:, wants]
            if a == b:
                continue
            if (b, a) in problem.edges:
                problem.edges[b, a] = problem.edges[b, a] + matrix.T
            elif (a, b) in problem.edges:
                problem.edges[a, b] = problem.edges[a, b] + matrix
            else:
                problem.edges[a, b] = matrix
