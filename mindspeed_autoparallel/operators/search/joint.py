"""All cuts at once: the choices of every operator on all mesh dims as one problem, for an optimum or a lower bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy

from mindspeed_autoparallel.operators.graph.counted import all_counts, counted, least_shares, orders
from mindspeed_autoparallel.operators.graph.node import NO_CUT, Node
from mindspeed_autoparallel.operators.graph.redistribution import Placements, gradient_of_output, moved_bytes
from mindspeed_autoparallel.operators.graph.shortest import all_pairs
from mindspeed_autoparallel.operators.graph.transitions import is_valid
from mindspeed_autoparallel.operators.search.factors import FactorGraph, Table
from mindspeed_autoparallel.operators.search.pricing import Machine, work_us
from mindspeed_autoparallel.operators.search.problem import Reads, shape_numbers, total_us
from mindspeed_autoparallel.operators.search.state import Decisions

Choice = tuple[int, ...]
_ROUND = 1e-3
"""Tolerance in bytes for rounding of shares of a tensor."""
_ROUNDED_OFF = 2.0
"""Bytes by which rounding to whole bytes may lower a price."""
_MOST_ALONE, _MOST_ALONE_WIDE = 20_000, 200
"""Most prices of one tensor that are computed one by one without a table: on up to four mesh dims, and on more."""
MOST_CHOICES = 1300
"""Most choices of one operator over all mesh dims for which the joint problem is built."""


@dataclass
class JointProblem:
    """The choices of all operators (or groups of tied ones) over the whole mesh; costs in microseconds."""

    mesh: tuple[int, ...]
    members: list[list[str]] = field(default_factory=list)
    choices: list[list[Choice]] = field(default_factory=list)
    node_us: list[Table] = field(default_factory=list)
    reads: list[Reads] = field(default_factory=list)

    def total_us(self, picks: Sequence[int]) -> float:
        """Return the price of ``picks``, an index into ``choices`` per variable."""
        return total_us(self.node_us, self.reads, picks)

    def picks(self, decisions: Decisions) -> list[int] | None:
        """Return the picks of ``decisions``; None if tied operators differ."""
        found = []
        for names, choices in zip(self.members, self.choices, strict=True):
            held = {decisions.choices[name] for name in names}
            if len(held) > 1 or (first := held.pop()) not in choices:
                return None
            found.append(choices.index(first))
        return found

    def decisions(self, graph_decisions: Decisions, picks: Sequence[int]) -> Decisions:
        """Return the decisions of ``picks`` for every operator of the graph of ``graph_decisions``."""
        chosen = {name: self.choices[v][p] for v, p in enumerate(picks) for name in self.members[v]}
        return Decisions(graph_decisions.graph, self.mesh, chosen)


def build_joint(
    start: Decisions,
    mesh: tuple[int, ...],
    machine: Machine,
    pins: Sequence[Mapping[str, int]],
    *,
    tied: bool,
    among: Mapping[str, Sequence[Choice]] | None = None,
) -> JointProblem | None:
    """Build the problem of all cuts of ``mesh`` at once; None for too many choices. ``start`` holds the uncut graph.

    ``pins``: per mesh dim, the axis of every pinned operator. ``among`` gives the choices of an operator (the first of
    tied ones); without it choices are counts of cuts, with the least prices among placements of these counts.
    """
    graph = start.graph
    problem = JointProblem(mesh)
    shapes = shape_numbers(start)
    variable: dict[str, int] = {}
    groups: dict[object, int] = {}
    for name, node in graph.nodes.items():
        fixed = tuple(pin.get(name) for pin in pins)
        key = (node.role, node.kind, shapes[name], fixed) if tied and node.role else name
        if key not in groups:
            choices = all_cut_counts(node, mesh, fixed) if among is None else list(among[name])
            if len(choices) > MOST_CHOICES:
                return None
            groups[key] = len(problem.members)
            problem.members.append([])
            problem.choices.append(choices)
            parts = [math.prod(n for n, c in zip(mesh, choice, strict=True) if c != NO_CUT) for choice in choices]
            problem.node_us.append(work_us(graph, node, machine) / numpy.array(parts, dtype=float))
        variable[name] = groups[key]
        problem.members[groups[key]].append(name)
    for v, members in enumerate(problem.members):
        problem.node_us[v] = problem.node_us[v] * len(members)
    return problem if _add_reads(problem, start, variable, machine, by_count=among is None) else None


def all_choices(node: Node, mesh: tuple[int, ...], fixed: Sequence[int | None]) -> list[Choice]:
    """List the choices of ``node`` over the whole mesh; a mesh dim with a ``fixed`` axis has only that one."""
    found: list[Choice] = [()]
    for parts, axis in zip(mesh, fixed, strict=True):
        longer = []
        for choice in found:
            cuts = [(a, n) for a, n in zip(choice, mesh, strict=False) if a != NO_CUT]
            allowed = [axis] if axis is not None else node.choices(parts, cuts)
            longer += [(*choice, a) for a in allowed]
        found = longer
    return found


def all_cut_counts(node: Node, mesh: tuple[int, ...], fixed: Sequence[int | None]) -> list[Choice]:
    """List the counts of the choices of ``node`` over the whole mesh."""
    if any(axis is not None for axis in fixed):
        return list(dict.fromkeys(counted(choice, mesh) for choice in all_choices(node, mesh, fixed)))
    sizes = tuple(axis.size if axis.cuttable else 1 for axis in node.axes)
    axes = [a for a, size in enumerate(sizes) if math.gcd(size, math.prod(mesh)) > 1]
    return [counts for counts in all_counts((NO_CUT, *axes), mesh) if is_valid(counts, mesh, sizes)]


def arranged(
    node: Node, mesh: tuple[int, ...], fixed: Sequence[int | None], counts: Sequence[Choice], *, in_blocks: bool = False
) -> list[Choice]:
    """List the choices of ``node`` with these ``counts``; the list ends once it exceeds ``MOST_CHOICES``.

    ``in_blocks``: only those in which the mesh dims of one axis are neighbours, if there are any.
    """
    if any(axis is not None for axis in fixed):
        wanted = set(counts)
        return [choice for choice in all_choices(node, mesh, fixed) if counted(choice, mesh) in wanted]
    found: list[Choice] = []
    for count in counts:
        ordered = orders(count, mesh)
        blocks = [c for c in ordered if len(list(itertools.groupby(c))) == len(set(c))] if in_blocks else ordered
        found += blocks or ordered  # mesh dims of different sizes may leave no order in blocks
        if len(found) > MOST_CHOICES:
            break
    return found


def _add_reads(
    problem: JointProblem, start: Decisions, variable: Mapping[str, int], machine: Machine, *, by_count: bool
) -> bool:
    """Add the redistributions of every tensor; return whether all could be priced."""
    graph, mesh = start.graph, problem.mesh

    def seen_as(placements: Placements) -> Placements:
        return counted(placements, mesh) if by_count else placements

    times: dict[object, int] = {}
    examples: dict[object, tuple[str, list[tuple[str, int]]]] = {}
    for name, readers in graph.consumers().items():
        if readers:
            flows = tuple(graph.flows_back(name, reader, slot) for reader, slot in readers)
            key = (variable[name], tuple((variable[reader], slot) for reader, slot in readers), flows)
            times[key] = times.get(key, 0) + 1
            examples.setdefault(key, (name, readers))
    prices: dict[object, Table] = {}
    for seen, (name, readers) in examples.items():
        producer = graph.nodes[name]
        made = [
            seen_as(tuple(producer.output_placement(c) for c in choice)) for choice in problem.choices[variable[name]]
        ]
        wants: dict[tuple[Placements, Placements | None], int] = {}
        reading: dict[tuple[int, tuple[int, ...]], None] = {}
        for reader, slot in readers:
            node, flows_back = graph.nodes[reader], graph.flows_back(name, reader, slot)
            indices = []
            for choice in problem.choices[variable[reader]]:
                want = seen_as(tuple(node.operand_placement(slot, c) for c in choice))
                back = seen_as(tuple(node.gradient_placement(slot, c) for c in choice)) if flows_back else None
                indices.append(wants.setdefault((want, back), len(wants)))
            reading[variable[reader], tuple(indices)] = None
        same = (producer.output_shape, producer.item_bytes, tuple(made), tuple(wants))
        if same not in prices:
            price = _least_prices if by_count else _prices
            sent = price(producer, made, list(wants), mesh)
            if sent is None:
                return False
            prices[same] = sent / machine.link_bytes_per_us
        found = tuple((v, numpy.array(indices)) for v, indices in reading)
        problem.reads.append(Reads(variable[name], found, prices[same] * times[seen]))
    return True


def _prices(
    producer: Node, made: list[Placements], wants: list[tuple[Placements, Placements | None]], mesh: tuple[int, ...]
) -> Table | None:
    """Return bytes from each of ``made`` to each of ``wants``, both directions; None for too many without a table."""
    shares = all_pairs(producer.output_shape, mesh) if producer.output_bytes % math.prod(mesh) ** 2 == 0 else None
    if shares is not None:
        whole: Table = numpy.floor(_both_ways(*shares, made, wants) * producer.output_bytes + _ROUND)
        return whole
    pairs = dict.fromkeys(itertools.product(made, [want for want, _ in wants]))
    left = dict.fromkeys(back for _, back in wants if back is not None)
    pairs.update(dict.fromkeys(itertools.product(left, map(gradient_of_output, made))))
    if len(pairs) > (_MOST_ALONE if len(mesh) <= 4 else _MOST_ALONE_WIDE):
        return None
    states = itertools.chain(itertools.chain.from_iterable(pairs), map(gradient_of_output, made))
    index = {state: at for at, state in enumerate(dict.fromkeys(states))}
    table = numpy.zeros((len(index), len(index)))
    for source, target in pairs:
        sent = moved_bytes(source, target, producer.output_shape, producer.item_bytes, mesh)
        table[index[source], index[target]] = sent
    return _both_ways(index, table, made, wants)


def _both_ways(
    index: dict[Placements, int],
    table: Table,
    made: list[Placements],
    wants: list[tuple[Placements, Placements | None]],
) -> Table:
    """Return the entries of ``table`` from each of ``made`` to each of ``wants``, plus those of the gradient back."""
    home = [index[gradient_of_output(out)] for out in made]
    both: Table = table[numpy.ix_([index[out] for out in made], [index[want] for want, _ in wants])]
    flowing = [w for w, (_, back) in enumerate(wants) if back is not None]
    left = [index[back] for _, back in wants if back is not None]
    both[:, flowing] += table[numpy.ix_(left, home)].T
    return both


def _least_prices(
    producer: Node, made: list[Placements], wants: list[tuple[Placements, Placements | None]], mesh: tuple[int, ...]
) -> Table | None:
    """Return bytes that are never above those of placements with these counts; None for too many counts."""
    shares = least_shares(producer.output_shape, mesh)
    if shares is None:
        return None
    bytes_: Table = _both_ways(*shares, made, wants) * producer.output_bytes
    if producer.output_bytes % math.prod(mesh) ** 2 == 0:
        return bytes_
    least: Table = numpy.maximum(bytes_ - _ROUNDED_OFF, 0.0)
    return least


def exact_factors(problem: JointProblem, kept: list[Table], largest: int) -> FactorGraph | None:
    """Return the problem over the choices ``kept`` as factors; None if a table would exceed ``largest`` entries."""
    graph = FactorGraph([us[k] for us, k in zip(problem.node_us, kept, strict=True)])
    for read in problem.reads:
        producer = kept[read.producer]
        readers = [(v, wants[kept[v]]) for v, wants in read.readers]
        cost = read.cost_us[producer]
        scope = (read.producer, *(v for v, _ in readers))
        shape = [len(producer), *(len(wants) for _, wants in readers)]
        if math.prod(shape) > largest:
            return None
        total = numpy.zeros(shape)
        rank = len(shape)
        for index, (_, wants) in enumerate(readers):
            first = cost[:, wants].reshape([shape[0], *(len(wants) if a == index else 1 for a in range(rank - 1))])
            total += first * _not_paid_before(readers[:index], wants, index, shape)
        graph.add(scope, total)
    return graph


def _not_paid_before(earlier: list[tuple[int, Table]], wants: Table, index: int, shape: list[int]) -> Table | float:
    """Return 1 where none of the ``earlier`` readers needs the tensor in this reader's placement."""
    paid: Table | float = 1.0
    for other, (_, wanted) in enumerate(earlier):
        differs = (wanted[:, None] != wants[None, :]).astype(float)
        paid = paid * differs.reshape([1, *(n if a in (other, index) else 1 for a, n in enumerate(shape[1:]))])
    return paid
