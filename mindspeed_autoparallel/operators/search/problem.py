"""One cut of the whole graph as a problem of choices: a cost per choice and a cost per pair on each edge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy

from mindspeed_autoparallel.operators.graph.node import NO_CUT, PARTIAL, REPLICATE, Graph, Node
from mindspeed_autoparallel.operators.graph.redistribution import Placements, gradient_of_output, moved_bytes
from mindspeed_autoparallel.operators.search.state import Decisions

Matrix = numpy.ndarray


@dataclass(frozen=True)
class Machine:
    """Rates that turn work into time. Defaults: a 300 TFLOP/s device, 1.6 TB/s memory, 100 GB/s links."""

    flops_per_us: float = 3.0e8
    memory_bytes_per_us: float = 1.6e6
    link_bytes_per_us: float = 1.0e5


@dataclass(frozen=True)
class Reads:
    """Readers of one tensor, or of alike tensors of tied operators; those that want it alike share a redistribution.

    ``readers``: variable, and for each of its choices the index of what it wants; ``cost_us[p, w]``: to take the tensor
    from the producer's choice ``p`` to want ``w``, both directions.
    """

    producer: int
    readers: tuple[tuple[int, tuple[int, ...]], ...]
    cost_us: Matrix


@dataclass
class CutProblem:
    """Variables are operators, or groups of tied ones; costs in microseconds, forward and backward together.

    ``reads`` are the redistributions; ``edges`` the same with every reader paying for itself, for the searches that
    decide one operator at a time.
    """

    parts: int
    members: list[list[str]] = field(default_factory=list)
    choices: list[list[int]] = field(default_factory=list)
    node_us: list[Matrix] = field(default_factory=list)
    pending_us: list[Matrix] = field(default_factory=list)
    """Reducing the sums that a choice leaves pending, gradients of parameters not counted; no part of the cost, which
    has them on the edges."""
    parameter_bytes: list[Matrix] = field(default_factory=list)
    reads: list[Reads] = field(default_factory=list)
    edges: dict[tuple[int, int], Matrix] = field(default_factory=dict)

    def total_us(self, picks: list[int]) -> float:
        """Cost of ``picks``, an index into ``choices`` per variable."""
        total = sum(float(self.node_us[v][p]) for v, p in enumerate(picks))
        for read in self.reads:
            wanted = {wants[picks[v]] for v, wants in read.readers}
            total += sum(float(read.cost_us[picks[read.producer], w]) for w in wanted)
        return total

    def spread(self, picks: list[int]) -> dict[str, int]:
        """The choice of every operator from the pick of its variable."""
        return {name: self.choices[v][p] for v, p in enumerate(picks) for name in self.members[v]}

    def picks(self, chosen: Mapping[str, int]) -> list[int]:
        """The inverse of ``spread``: of tied operators the first one counts."""
        return [self.choices[v].index(chosen[names[0]]) for v, names in enumerate(self.members)]


def work_us(node: Node, machine: Machine) -> float:
    """Compute time of forward and backward (twice the forward) of the whole operator on one device."""
    if not node.inputs:
        return 0.0
    return 3 * (node.flops / machine.flops_per_us + 2 * node.output_bytes / machine.memory_bytes_per_us)


def node_us(node: Node, choice: int, parts: int, cuts: tuple[tuple[int, int], ...], machine: Machine) -> float:
    """Compute time of one device's piece when ``choice`` is cut into ``parts`` after the earlier ``cuts``."""
    divided = (parts if choice != NO_CUT else 1) * math.prod(p for _, p in cuts)
    return work_us(node, machine) / divided


def pending_us(graph: Graph, node: Node, choice: int, parts: int, divided: int, machine: Machine) -> float:
    """Time to reduce what ``choice`` leaves pending: the output, and gradients of inputs that are no parameters.

    ``divided``: parts that the earlier cuts made of the operator.
    """
    sizes = [node.output_bytes] if node.output_placement(choice) == PARTIAL else []
    for slot, source in enumerate(node.inputs):
        given = graph.nodes[source]
        if given.needs_gradient and not given.is_parameter and node.gradient_placement(slot, choice) == PARTIAL:
            sizes.append(given.output_bytes)
    moved = sum(moved_bytes((PARTIAL,), (REPLICATE,), size // divided, (parts,)) for size in sizes)
    return moved / machine.link_bytes_per_us


def build_problem(
    decisions: Decisions, parts: int, machine: Machine, pins: Mapping[str, int], *, tied: bool, at: int | None = None
) -> CutProblem:
    """The problem of one more cut into ``parts``, before mesh dim ``at`` or after all others.

    ``pins`` fixes operators; ``tied`` joins operators of equal role.
    """
    graph = decisions.graph
    problem = CutProblem(parts)
    shapes = _shapes(decisions)
    variable: dict[str, int] = {}
    groups: dict[object, int] = {}
    for name, node in graph.nodes.items():
        key = (node.role, node.kind, shapes[name], pins.get(name)) if tied and node.role else name
        if key not in groups:
            groups[key] = len(problem.members)
            cuts = decisions.cuts(name)
            allowed = [pins[name]] if name in pins else node.choices(parts, cuts)
            problem.members.append([])
            problem.choices.append(allowed)
            problem.node_us.append(numpy.array([node_us(node, c, parts, cuts, machine) for c in allowed]))
            local = node.output_bytes // math.prod(p for _, p in cuts)
            held = [local // (parts if c != NO_CUT else 1) if node.is_parameter else 0 for c in allowed]
            problem.parameter_bytes.append(numpy.array(held, dtype=float))
            divided = math.prod(p for _, p in cuts)
            pending = [pending_us(graph, node, c, parts, divided, machine) for c in allowed]
            problem.pending_us.append(numpy.array(pending))
        variable[name] = groups[key]
        problem.members[groups[key]].append(name)
    for v, members in enumerate(problem.members):  # what is alike costs alike
        problem.node_us[v] = problem.node_us[v] * len(members)
        problem.parameter_bytes[v] = problem.parameter_bytes[v] * len(members)
    _add_reads(problem, decisions, machine, variable, len(decisions.mesh) if at is None else at)
    _add_edges(problem)
    return problem


def _shapes(decisions: Decisions) -> dict[str, int]:
    """A number per operator, equal for operators that cost the same: comparing the shapes themselves is slow."""
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
    """Redistributions of every tensor by all mesh dims, in groups of readers that can still want it alike."""
    times: dict[object, int] = {}
    examples: dict[object, tuple[str, list[tuple[str, int]]]] = {}
    for name, readers in decisions.graph.consumers().items():
        groups: dict[object, list[tuple[str, int]]] = {}
        for reader, slot in readers:
            settled = (decisions.operand_placements(reader, slot), decisions.gradient_placements(reader, slot))
            groups.setdefault(settled, []).append((reader, slot))
        for group in groups.values():
            key = (variable[name], tuple((variable[reader], slot) for reader, slot in group))
            times[key] = times.get(key, 0) + 1
            examples.setdefault(key, (name, group))
    costs: dict[object, Matrix] = {}
    mesh = (*decisions.mesh[:at], problem.parts, *decisions.mesh[at:])
    for group_key, (name, group) in examples.items():
        wants: dict[tuple[int, int], int] = {}
        wanted = []
        for reader, slot in group:
            node, v = decisions.graph.nodes[reader], variable[reader]
            pairs = [(node.operand_placement(slot, c), node.gradient_placement(slot, c)) for c in problem.choices[v]]
            wanted.append((v, tuple(wants.setdefault(pair, len(wants)) for pair in pairs)))
        producer, (reader, slot) = decisions.graph.nodes[name], group[0]
        made = [producer.output_placement(c) for c in problem.choices[variable[name]]]
        ends = (
            decisions.output_placements(name),
            decisions.operand_placements(reader, slot),
            decisions.gradient_placements(reader, slot),
        )
        same = (producer.output_bytes, producer.needs_gradient, tuple(made), tuple(wants), ends)
        if same not in costs:
            costs[same] = _sent_bytes(producer, made, list(wants), ends, mesh, at) / machine.link_bytes_per_us
        problem.reads.append(Reads(variable[name], tuple(dict.fromkeys(wanted)), costs[same] * times[group_key]))


def _sent_bytes(
    producer: Node,
    made: list[int],
    wants: list[tuple[int, int]],
    ends: tuple[Placements, Placements, Placements],
    mesh: tuple[int, ...],
    at: int,
) -> Matrix:
    """Bytes sent for each placement that is made (rows) and wanted (columns) on mesh dim ``at``; ``ends``: the output,
    what is wanted and its gradient on the other mesh dims."""

    def full(placements: Placements, placement: int) -> Placements:
        return (*placements[:at], placement, *placements[at:])

    output, operand, gradient = ends
    result = numpy.zeros((len(made), len(wants)))
    for p, placement in enumerate(made):
        out = full(output, placement)
        for w, (want, back) in enumerate(wants):
            moved = moved_bytes(out, full(operand, want), producer.output_bytes, mesh)
            if producer.needs_gradient:
                moved += moved_bytes(full(gradient, back), gradient_of_output(out), producer.output_bytes, mesh)
            result[p, w] = moved
    return result


def _add_edges(problem: CutProblem) -> None:
    """What each reader would pay alone, edges between the same variables added up."""
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
