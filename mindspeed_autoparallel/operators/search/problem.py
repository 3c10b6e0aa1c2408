"""One cut of the whole graph as a problem of choices: a cost per choice and a cost per pair on each edge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy

from mindspeed_autoparallel.operators.graph.node import NO_CUT, PARTIAL, REPLICATE, Graph, Node
from mindspeed_autoparallel.operators.graph.redistribution import gradient_of_output, moved_bytes
from mindspeed_autoparallel.operators.search.state import Decisions

Matrix = numpy.ndarray


@dataclass(frozen=True)
class Machine:
    """Rates that turn work into time. Defaults: a 300 TFLOP/s device, 1.6 TB/s memory, 100 GB/s links."""

    flops_per_us: float = 3.0e8
    memory_bytes_per_us: float = 1.6e6
    link_bytes_per_us: float = 1.0e5


@dataclass
class CutProblem:
    """Variables are operators, or groups of tied ones; costs in microseconds, forward and backward together."""

    parts: int
    members: list[list[str]] = field(default_factory=list)
    choices: list[list[int]] = field(default_factory=list)
    node_us: list[Matrix] = field(default_factory=list)
    pending_us: list[Matrix] = field(default_factory=list)
    """Reducing the sums that a choice leaves pending, gradients of parameters not counted; no part of the cost, which
    has them on the edges."""
    parameter_bytes: list[Matrix] = field(default_factory=list)
    edges: dict[tuple[int, int], Matrix] = field(default_factory=dict)

    def total_us(self, picks: list[int]) -> float:
        """Cost of ``picks``, an index into ``choices`` per variable."""
        total = sum(float(self.node_us[v][p]) for v, p in enumerate(picks))
        return total + sum(float(m[picks[a], picks[b]]) for (a, b), m in self.edges.items())

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


def edge_us(
    producer: Node, consumer: Node, slot: int, parts: int, local_bytes: int, machine: Machine
) -> dict[tuple[int, int], float]:
    """Redistribution time, both directions, for each pair (producer's choice, consumer's choice)."""
    result = {}
    for made in range(-1, len(producer.axes)):
        for wanted in range(-1, len(consumer.axes)):
            out = (producer.output_placement(made),)
            moved = moved_bytes(out, (consumer.operand_placement(slot, wanted),), local_bytes, (parts,))
            if producer.needs_gradient:
                back = (consumer.gradient_placement(slot, wanted),)
                moved += moved_bytes(back, gradient_of_output(out), local_bytes, (parts,))
            result[made, wanted] = moved / machine.link_bytes_per_us
    return result


def build_problem(
    decisions: Decisions, parts: int, machine: Machine, pins: Mapping[str, int], *, tied: bool
) -> CutProblem:
    """The problem of the next cut into ``parts``; ``pins`` fixes operators; ``tied`` joins operators of equal role."""
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
    _add_edges(problem, decisions, machine, variable, shapes)
    return problem


def _shapes(decisions: Decisions) -> dict[str, int]:
    """A number per operator, equal for operators that cost the same: comparing the shapes themselves is slow."""
    numbers: dict[object, int] = {}
    result = {}
    for name, node in decisions.graph.nodes.items():
        cuts = decisions.cuts(name)
        shape = (node.axes, node.operands, node.output, node.output_shape, node.item_bytes, node.flops, cuts)
        result[name] = numbers.setdefault((shape, node.is_parameter, node.needs_gradient), len(numbers))
    return result


def _add_edges(
    problem: CutProblem,
    decisions: Decisions,
    machine: Machine,
    variable: Mapping[str, int],
    shapes: Mapping[str, int],
) -> None:
    """Redistribution of every edge, edges between the same variables added up."""
    times: dict[tuple[int, int, int, int, int], int] = {}
    examples: dict[tuple[int, int, int, int, int], tuple[Node, Node]] = {}
    for producer, consumer, slot in decisions.graph.edges():
        first, second = producer.name, consumer.name
        key = (variable[first], variable[second], slot, shapes[first], shapes[second])
        times[key] = times.get(key, 0) + 1
        examples.setdefault(key, (producer, consumer))
    for key, (producer, consumer) in examples.items():
        a, b, slot = key[:3]
        local = producer.output_bytes
        for axis, p in decisions.cuts(producer.name):
            local //= p if axis in producer.output else 1
        table = edge_us(producer, consumer, slot, problem.parts, local, machine)
        matrix = numpy.array([[table[x, y] for y in problem.choices[b]] for x in problem.choices[a]]) * times[key]
        if a == b:
            problem.node_us[a] = problem.node_us[a] + numpy.diagonal(matrix)
        elif (b, a) in problem.edges:
            problem.edges[b, a] = problem.edges[b, a] + matrix.T
        elif (a, b) in problem.edges:
            problem.edges[a, b] = problem.edges[a, b] + matrix
        else:
            problem.edges[a, b] = matrix
