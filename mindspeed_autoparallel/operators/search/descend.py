"""Local search over a joint problem: one operator at a time to its cheapest choice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from mindspeed_autoparallel.operators.search.joint import JointProblem

_SAME = 1e-9


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
    """Price read ``index`` for every choice of variable ``v``, the others as they are."""
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
