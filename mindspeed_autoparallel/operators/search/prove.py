"""The joint optimum over all cuts where elimination reaches it, otherwise a cheaper plan and a lower bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.operators.search.factors import (
    LARGEST_TABLE,
    FactorGraph,
    bound_by_shifting,
    eliminate,
    values_that_may_win,
    without_dominated,
)
from mindspeed_autoparallel.operators.search.joint import JointProblem, build_joint, exact_factors, relaxed_factors
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.operators.search.state import Decisions

_ROUNDS = 120
_SAME = 1e-9


@dataclass(frozen=True)
class Proof:
    """Give a plan that is at least as cheap as the one to prove, its cost, and a lower bound on that of every plan."""

    decisions: Decisions
    cost_us: float
    bound_us: float
    method: str


def prove(
    decisions: Decisions,
    cost_us: float,
    machine: Machine,
    pins: Sequence[Mapping[str, int]],
    *,
    tied: bool,
) -> Proof | None:
    """Improve ``decisions`` (of ``cost_us``) over all cuts at once and bound what is left; None for too many choices.

    With ``tied`` both are over plans that cut operators of equal role alike.
    """
    graph = decisions.graph
    empty = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
    problem = build_joint(empty, decisions.mesh, machine, pins, tied=tied)
    if problem is None:
        return None
    best, upper = problem.picks(decisions), cost_us
    relaxed = relaxed_factors(problem)
    bound, shifted = bound_by_shifting(relaxed, _ROUNDS, upper)
    tried = _descend(problem, [int(numpy.argmin(s)) for s in shifted.single])
    if problem.total_us(tried) < upper * (1 - _SAME):
        best, upper = tried, problem.total_us(tried)
    method = "cost shifting"
    if bound < upper * (1 - _SAME):
        kept = values_that_may_win(shifted, bound, upper)
        found = _least(exact_factors(problem, kept, LARGEST_TABLE), kept)
        if found is not None:
            method, bound = "elimination over all cuts", min(upper, problem.total_us(found))
            if problem.total_us(found) < upper * (1 - _SAME):
                best, upper = found, problem.total_us(found)
        else:
            weaker = _least(relaxed.restricted(kept), kept)
            if weaker is not None:
                method, bound = "elimination with shared reads split", max(bound, min(upper, relaxed.cost(weaker)))
                tried = _descend(problem, weaker)
                if problem.total_us(tried) < upper * (1 - _SAME):
                    best, upper = tried, problem.total_us(tried)
    result = decisions if best is None or upper == cost_us else problem.decisions(decisions, best)
    return Proof(result, upper, min(bound, upper), method)


def _least(graph: FactorGraph | None, kept: list[numpy.ndarray]) -> list[int] | None:
    """Return eliminate over ``graph`` and give the values in the numbering before ``kept``."""
    if graph is None:
        return None
    alive = without_dominated(graph)
    found = eliminate(graph.restricted(alive))
    if found is None:
        return None
    return [int(kept[v][alive[v][p]]) for v, p in enumerate(found)]


def _descend(problem: JointProblem, picks: list[int]) -> list[int]:
    """Change one operator at a time to its cheapest choice until nothing improves."""
    touching: list[list[int]] = [[] for _ in picks]
    for index, read in enumerate(problem.reads):
        for v in {read.producer, *(v for v, _ in read.readers)}:
            touching[v].append(index)
    picks, changed = list(picks), True
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
