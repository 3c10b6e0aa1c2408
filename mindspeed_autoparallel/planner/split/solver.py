"""Finds the fastest placement of layers on the stages of one pipeline, with a bound on what a better one could take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindspeed_autoparallel.planner.split.model.integer_master import IntegerMaster
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.solution import Placement, SplitSolution, check_schedule
from mindspeed_autoparallel.planner.split.state import Beginning, Limits, State, nothing_found
from mindspeed_autoparallel.planner.split.strategies.portfolio import PORTFOLIO


def solve(
    problem: SplitProblem,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    below: int | None = None,
    effort: float | None = None,
    excluded: Sequence[Placement] = (),
    begin: Beginning | None = None,
) -> SplitSolution:
    """Return the fastest placement that fits, with a bound.

    Args:
        below: return only a plan with a smaller step time.
        excluded: plans whose layers are not to be used again (beyond chains).
        effort: limit that does not depend on the machine, in units of about a processor second: the integer solver's
            deterministic clock, and counts of the other searches (``Settings.effort_...``).
        begin: plan and cuts of the same pipeline with other memory and virtual stages.

    Raises:
        InfeasiblePlan: no plan fits; names the smallest memory that fits.
        NoneBelow: proved, no plan takes less than ``below``, or none fits.
        StoppedEarly: the limits ended before a plan was found.
    """
    limits = Limits(time_limit_s=time_limit_s, below=below, effort=effort, seed=seed)
    check_schedule(problem)
    state = State(problem=problem, limits=limits, excluded=tuple(excluded), begin=begin)
    for strategy in PORTFOLIO:
        if strategy.suits(state):
            strategy.run(state)
            if state.done or state.closed:
                break
    return state.solution()


def fits_within(problem: SplitProblem, extra: int, time_limit_s: float) -> bool:
    """Return whether any plan fits when every stage may hold ``extra`` more. Raises ``StoppedEarly``."""
    master = IntegerMaster(replace(problem, memory_limit=tuple(limit + extra for limit in problem.memory_limit)), 0)
    master.model.clear_objective()
    status, _, placements = master.solve(time_limit_s, 0, None, None, None)
    if status == "unknown":
        raise nothing_found(time_limit_s, 0)
    return bool(placements)
