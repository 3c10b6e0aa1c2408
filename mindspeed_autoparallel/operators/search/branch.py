"""Best-first search over a joint problem: bounds by cost shifting, elimination of small parts, descents."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.operators.search.dual import Dual
from mindspeed_autoparallel.operators.search.factors import LARGEST_TABLE, FactorGraph, eliminate, without_dominated
from mindspeed_autoparallel.operators.search.joint import JointProblem, exact_factors

_ROUNDS, _ROUNDS_OF_PART = 240, 32
_LARGEST_OF_PART = 1_000_000
"""Most entries of a table in the elimination of a part of the problem."""
_WORK = 200_000_000
"""Visited prices (rounds times prices) after which no part is divided any more: a few seconds."""
_SHIFT_OVERHEAD = 4000
"""Fixed cost of one tensor in a round, as a number of prices."""
_SAME = 1e-9


@dataclass(frozen=True)
class Solved:
    """No sum is below the smaller of ``bound`` and the given upper bound; ``picks`` are the best found.

    ``kept``: per variable, the values that a sum below the upper bound may use.
    """

    bound: float
    picks: list[int]
    kept: list[numpy.ndarray]


def solve_joint(problem: JointProblem, upper: float, start: list[int] | None) -> Solved:
    """Bound ``problem`` from below and search for its least sum.

    ``upper``: the sum of a known solution; ``start``: picks to descend from, or None. If cost shifting leaves a gap,
    the values of a variable are halved, in the part with the least bound first.
    """
    root = Dual(problem)
    left = _WORK - _work(root, root.raise_bound(upper, _ROUNDS))
    starts = [_least_values(root), *([start] if start is not None else [])]
    picks = min((descend(problem, given) for given in starts), key=problem.total_us)
    upper = min(upper, problem.total_us(picks))
    kept, largest, bound = root.kept, LARGEST_TABLE, root.bound
    ties = itertools.count()
    parts = [(root.bound, next(ties), root)]
    while parts:
        bound, _, part = heapq.heappop(parts)
        if bound >= upper * (1 - _SAME) or left < 0:
            break
        found = least_among(problem, part.kept, largest)
        largest = _LARGEST_OF_PART
        if found is not None:
            picks = min(picks, found, key=problem.total_us)
            upper = min(upper, problem.total_us(picks))
            heapq.heappush(parts, (max(bound, min(upper, problem.total_us(found))), next(ties), part))
            continue
        for half in _halves(part):
            left -= _work(half, half.raise_bound(upper, _ROUNDS_OF_PART))
            if half.bound < upper * (1 - _SAME):
                picks = min(picks, descend(problem, _least_values(half)), key=problem.total_us)
                upper = min(upper, problem.total_us(picks))
            heapq.heappush(parts, (max(half.bound, bound), next(ties), half))
    return Solved(bound, picks, kept)


def _work(dual: Dual, rounds: int) -> int:
    return rounds * (dual.entries + _SHIFT_OVERHEAD * len(dual.tensors))


def _least_values(dual: Dual) -> list[int]:
    return [int(kept[numpy.argmin(single)]) for kept, single in zip(dual.kept, dual.single, strict=True)]


def _halves(part: Dual) -> list[Dual]:
    """Halve the values of the variable that most prices depend on into cheap and expensive ones."""
    prices = [0] * len(part.single)
    for tensor in part.tensors:
        for v in tensor.variables:
            prices[v] += tensor.cost.size
    v = max(range(len(prices)), key=lambda u: (len(part.single[u]) > 1) * prices[u])
    order = numpy.argsort(part.single[v], kind="stable")
    middle = (len(order) + 1) // 2
    return [part.only(v, numpy.sort(places)) for places in (order[:middle], order[middle:])]


def least_among(problem: JointProblem, kept: list[numpy.ndarray], largest: int) -> list[int] | None:
    """Return the picks of least sum over the values ``kept``; None if an elimination table exceeds ``largest``."""
    graph: FactorGraph | None = exact_factors(problem, kept, largest)
    if graph is None:
        return None
    alive = without_dominated(graph)
    found = eliminate(graph.restricted(alive), largest)
    if found is None:
        return None
    return [int(kept[v][alive[v][p]]) for v, p in enumerate(found)]


def descend(problem: JointProblem, start: Sequence[int]) -> list[int]:
    """Change one operator at a time to its cheapest choice until nothing improves."""
    touching: list[list[int]] = [[] for _ in start]
    for index, read in enumerate(problem.reads):
        for v in {read.producer, *(v for v, _ in read.readers)}:
            touching[v].append(index)
    picks, changed = list(start), True
    while changed:
        changed = False
        for v in range(len(picks)):
            cost = problem.node_us[v].copy()
            for index in touching[v]:
                cost += _read_costs(problem, index, v, picks)
            least = int(cost.argmin())
            if cost[least] < cost[picks[v]] * (1 - _SAME) - 1e-12:
                picks[v], changed = least, True
    return picks


def _read_costs(problem: JointProblem, index: int, v: int, picks: list[int]) -> numpy.ndarray:
    """Return the price of read ``index`` for every choice of variable ``v``, with the others unchanged."""
    read = problem.reads[index]
    number = len(problem.node_us[v])
    producers = numpy.arange(number) if read.producer == v else numpy.full(number, picks[read.producer])
    total = numpy.zeros(number)
    wanted: list[numpy.ndarray] = []
    for reader, wants in read.readers:
        here = wants if reader == v else numpy.full(number, wants[picks[reader]])
        fresh: numpy.ndarray = numpy.ones(number, dtype=bool)
        for earlier in wanted:
            fresh &= earlier != here
        wanted.append(here)
        total += read.cost_us[producers, here] * fresh
    return total
