"""The joint problem over classes of choices, divided as needed until the bound meets the best known sum.

Choices with equal numbers of cuts start as one class, whose prices are never above those of its choices. So the least
sum over classes is a lower bound. A class that may still be in a cheaper sum, and whose prices differ from those of its
choices, is divided (counterexample-guided abstraction refinement).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy

from mindspeed_autoparallel.operators.graph.counted import counted
from mindspeed_autoparallel.operators.search.branch import Solved, descend, least_among
from mindspeed_autoparallel.operators.search.buckets import LeastSums, least_sums
from mindspeed_autoparallel.operators.search.factors import FactorGraph, Table
from mindspeed_autoparallel.operators.search.joint import JointProblem
from mindspeed_autoparallel.operators.search.problem import Reads

Classes = list[list[Table]]
"""Per variable, arrays of indices into its choices."""
_LARGEST = 8_000_000
"""Most entries of one table over classes."""
_LARGEST_INSIDE = 1_000_000
_WORK = 400_000_000
"""Visited entries after which nothing is divided any more: a few seconds."""
_NEAR = 0.1
"""Share of the gap between a part's bound and the best known sum: classes whose sums lie in it are divided together."""
_SAME = 1e-9


def refine(problem: JointProblem, classes: Classes, upper: float, best: Sequence[int]) -> Solved:
    """Bound ``problem`` over ``classes`` from below and search for sums below ``upper``, the sum of ``best``.

    If all tables of a part fit, its classes are divided; otherwise it is halved. Low bounds go first.
    """
    picks, bound, left = list(best), -math.inf, _WORK
    ties = itertools.count()
    parts: list[tuple[float, int, Classes]] = [(bound, next(ties), classes)]
    while parts:
        bound, _, part = heapq.heappop(parts)
        if bound >= upper * (1 - _SAME) or left < 0:
            break
        graph, shared = _over(problem, part)
        sums = least_sums(graph, _LARGEST)
        left -= 2 * sums.entries + sum(table.size for table in graph.tables.values())
        inside = _inside(problem, [held[p] for held, p in zip(part, sums.picks, strict=True)])
        found = min(inside, descend(problem, inside), key=problem.total_us)
        if problem.total_us(found) < upper * (1 - _SAME):
            picks, upper = found, problem.total_us(found)
        least = max(bound, sums.least)
        if least >= upper * (1 - _SAME):
            heapq.heappush(parts, (least, next(ties), part))
            continue
        loose = [*shared, *sums.divided]
        for smaller in _halved(part, sums, upper, loose) if loose else _divided(problem, part, sums, upper, inside):
            heapq.heappush(parts, (least, next(ties), smaller))
        if not parts:
            bound = least if loose or bound < least else upper
    return Solved(min(bound, upper), picks, [numpy.sort(numpy.concatenate(held)) for held in classes])


def by_counts(problem: JointProblem) -> Classes:
    """Group the choices of each variable that cut every axis by equally many mesh dims."""
    found: Classes = []
    for choices in problem.choices:
        alike: dict[tuple[int, ...], list[int]] = {}
        for index, choice in enumerate(choices):
            alike.setdefault(counted(choice, problem.mesh), []).append(index)
        found.append([numpy.array(held) for held in alike.values()])
    return found


def _inside(problem: JointProblem, kept: list[Table]) -> list[int]:
    """Return the picks of least sum over the choices ``kept``; the first of each if a table would be too large."""
    found = least_among(problem, kept, _LARGEST_INSIDE)
    return found if found is not None else [int(held[0]) for held in kept]


def _over(problem: JointProblem, classes: Classes) -> tuple[FactorGraph, list[int]]:
    """Return the problem over ``classes``, and the variables of tensors whose readers do not fit one table."""
    single = [numpy.array([us[c].min() for c in held]) for us, held in zip(problem.node_us, classes, strict=True)]
    graph, shared = FactorGraph(single), []
    for read in problem.reads:
        groups: list[list[tuple[int, Table]]] = []
        for reader in sorted(read.readers, key=lambda r: -len(classes[r[0]])):
            for group in groups:
                sizes = [len(classes[v]) for v in (read.producer, reader[0], *(v for v, _ in group))]
                if math.prod(sizes) <= _LARGEST:
                    group.append(reader)
                    break
            else:
                groups.append([reader])
        if len(groups) > 1:
            shared += [read.producer, *(v for v, _ in read.readers)]
        for group in groups:
            part = Reads(read.producer, tuple(group), read.cost_us / len(groups))
            graph.add((read.producer, *(v for v, _ in group)), _least_table(part, classes))
    return graph, shared


def _least_table(read: Reads, classes: Classes) -> Table:
    """Return prices over classes that are never above those of their choices.

    A reader pays if its possible needs and those of every earlier reader have nothing in common.
    """
    rows = numpy.stack([read.cost_us[c].min(axis=0) for c in classes[read.producer]])
    shape = [len(rows), *(len(classes[v]) for v, _ in read.readers)]
    total = numpy.zeros(shape)
    earlier: list[Table] = []
    for index, (v, wants) in enumerate(read.readers):
        may = numpy.zeros((len(classes[v]), rows.shape[1]), dtype=numpy.float32)
        for at, held in enumerate(classes[v]):
            may[at, wants[held]] = 1
        price = numpy.stack([rows[:, wants[held]].min(axis=1) for held in classes[v]], axis=1)
        term = price.reshape([n if a in (0, index + 1) else 1 for a, n in enumerate(shape)])
        for other, might in enumerate(earlier):
            apart = (might @ may.T == 0).reshape([n if a in (other + 1, index + 1) else 1 for a, n in enumerate(shape)])
            term = term * apart
        earlier.append(may)
        total += term
    return total


def _alive(part: Classes, sums: LeastSums, upper: float) -> list[list[int]]:
    return [[c for c, us in enumerate(found) if us < upper * (1 - _SAME)] for found in sums.with_value]


def _halved(part: Classes, sums: LeastSums, upper: float, loose: Sequence[int]) -> list[Classes]:
    """Halve the classes of one variable, of ``loose`` if one of these has several, into cheap and expensive ones."""
    alive = _alive(part, sums, upper)
    kept = [[held[c] for c in left] for held, left in zip(part, alive, strict=True)]
    if not all(kept):
        return []
    v = max(sorted(set(loose)), key=lambda u: len(kept[u]))
    if len(kept[v]) == 1:
        v = max(range(len(kept)), key=lambda u: len(kept[u]))
    if len(kept[v]) == 1:
        return []
    order = sorted(range(len(kept[v])), key=lambda c: float(sums.with_value[v][alive[v][c]]))
    middle = (len(order) + 1) // 2
    halves = ([kept[v][c] for c in sorted(half)] for half in (order[:middle], order[middle:]))
    return [[*kept[:v], half, *kept[v + 1 :]] for half in halves]


def _divided(
    problem: JointProblem, part: Classes, sums: LeastSums, upper: float, inside: Sequence[int]
) -> list[Classes]:
    """Divide the classes near the bound of variables whose tensors cost more than their classes; else of all."""
    near = sums.least + _NEAR * (upper - sums.least)
    dearer = _dearer(problem, [[held[p]] for held, p in zip(part, sums.picks, strict=True)], inside)
    alive = _alive(part, sums, upper)
    if not all(alive):
        return []
    for among in (dearer, set(range(len(part)))):
        made: Classes = []
        for v, held in enumerate(part):
            made.append([])
            for c in alive[v]:
                whole = v not in among or len(held[c]) == 1 or sums.with_value[v][c] > near
                made[v] += [held[c]] if whole else _by_first_difference(problem, v, held[c])
        if sum(map(len, made)) > sum(map(len, alive)):
            return [made]
    return []


def _dearer(problem: JointProblem, classes: Classes, inside: Sequence[int]) -> set[int]:
    """Return the variables of tensors that cost more with the choices ``inside`` than with their classes."""
    found: set[int] = set()
    for read in problem.reads:
        wanted = {int(wants[inside[v]]) for v, wants in read.readers}
        real = sum(float(read.cost_us[inside[read.producer], w]) for w in wanted)
        if real > float(_least_table(read, classes).ravel()[0]) * (1 + _SAME) + _SAME:
            found |= {read.producer, *(v for v, _ in read.readers)}
    return found


def _by_first_difference(problem: JointProblem, v: int, held: Table) -> list[Table]:
    """Divide choices by the cut of the first mesh dim on which they differ."""
    choices = numpy.array([problem.choices[v][c] for c in held])
    column = next(row for row in choices.T if len(set(row)) > 1)
    return [held[column == cut] for cut in sorted(set(column.tolist()))]
