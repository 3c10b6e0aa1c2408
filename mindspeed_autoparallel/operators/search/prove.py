"""The joint optimum over all cuts if elimination reaches it, otherwise a cheaper plan and a lower bound.

The first pass is over counts of mesh dims that cut each axis: few choices, with prices that are never above the real
ones, so the least sum is a lower bound. The second is over the choices whose counts may still be in a cheaper plan than
the best known one: they form classes of equal counts, divided where their prices differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.operators.search.branch import solve_joint
from mindspeed_autoparallel.operators.search.classes import by_counts, refine
from mindspeed_autoparallel.operators.search.joint import JointProblem, arranged, build_joint
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.operators.search.state import Decisions

_MOST_ENTRIES = 20_000_000
"""Most entries of all tables for which a bound is computed: beyond it each round takes more than a second."""
_SAME = 1e-9


@dataclass(frozen=True)
class Proof:
    """A plan that is at least as cheap as the one to prove, its cost, and a lower bound on that of every plan."""

    decisions: Decisions
    cost_us: float
    bound_us: float
    method: str


def prove(
    decisions: Decisions, cost_us: float, machine: Machine, pins: Sequence[Mapping[str, int]], *, tied: bool
) -> Proof | None:
    """Improve ``decisions`` (of ``cost_us``) over all cuts at once and bound the remaining gap; None for too many
    choices.

    With ``tied`` both are over plans that cut operators of equal role alike.
    """
    graph, mesh = decisions.graph, decisions.mesh
    empty = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
    counts = build_joint(empty, mesh, machine, pins, tied=tied)
    if counts is None or _entries(counts) > _MOST_ENTRIES:
        return None
    best, upper = decisions, cost_us
    solved = solve_joint(counts, upper, None)
    bound, method = solved.bound, "numbers of cuts"
    alone = [[picked] for picked in solved.picks]
    for among, in_blocks in ((alone, True), (alone, False), (solved.kept, False)):
        if bound >= upper * (1 - _SAME):
            break
        choices = {}
        for v, names in enumerate(counts.members):
            node, fixed = graph.nodes[names[0]], [pin.get(names[0]) for pin in pins]
            held = [counts.choices[v][p] for p in among[v]]
            choices[names[0]] = arranged(node, mesh, fixed, held, in_blocks=in_blocks)
        problem = build_joint(empty, mesh, machine, pins, tied=tied, among=choices)
        if problem is None or _entries(problem) > _MOST_ENTRIES:
            continue
        started = problem.picks(best)
        if among is alone or started is None:
            found = solve_joint(problem, upper, started)
        else:
            found = refine(problem, by_counts(problem), upper, started)
        cost = problem.total_us(found.picks)
        if cost < upper * (1 - _SAME):
            best, upper = problem.decisions(decisions, found.picks), cost
        if among is not alone:  # excluded choices cannot be below the upper bound that excluded them
            bound, method = max((bound, method), (min(found.bound, upper), "all cuts"))
    return Proof(best, upper, min(bound, upper), method)


def _entries(problem: JointProblem) -> int:
    return sum(read.cost_us.size * len(read.readers) for read in problem.reads)
