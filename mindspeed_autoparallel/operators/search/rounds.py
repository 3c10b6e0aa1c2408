"""Cuts solved again one at a time, the others fixed, for as long as the whole plan becomes cheaper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_autoparallel.operators.search.exact import Limits, solve_exact
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.operators.search.problem import build_problem
from mindspeed_autoparallel.operators.search.state import Decisions

LEAST_GAIN = 1e-6
"""Share of the cost below which another plan is not called cheaper."""
_MOST_ROUNDS = 4


def improve(
    decisions: Decisions,
    machine: Machine,
    pins: Sequence[Mapping[str, int]],
    *,
    tied: bool,
    limits: Limits | None = None,
    num_microbatches: int = 1,
) -> Decisions:
    """Give ``decisions`` or cheaper ones that no other choice of a single cut would improve."""
    unchanged = 0
    for turn in range(_MOST_ROUNDS * len(decisions.mesh)):
        dim = turn % len(decisions.mesh)
        others, parts = decisions.without(dim), decisions.mesh[dim]
        problem = build_problem(others, parts, machine, pins[dim], tied=tied, at=dim, num_microbatches=num_microbatches)
        chosen = {name: made[dim] for name, made in decisions.choices.items()}
        before = problem.picks(chosen)
        # Operators that have become alike may still differ in this cut: then there is nothing to compare with.
        if problem.spread(before) == chosen:
            after = solve_exact(problem, limits)
            if problem.total_us(after) < problem.total_us(before) * (1 - LEAST_GAIN):
                decisions, unchanged = others.insert(dim, parts, problem.spread(after)), 0
                continue
        unchanged += 1
        if unchanged == len(decisions.mesh):
            break
    return decisions
