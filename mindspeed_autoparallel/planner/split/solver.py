"""Find the fastest placement of layers on the stages of one pipeline, with a lower bound of its step time."""

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
    """Return the fastest placement that fits, with a lower bound of the step time.

    Times are in the units of ``problem``.

    Args:
        time_limit_s: wall-clock limit in seconds.
        below: return only a plan with a smaller step time.
        excluded: plans to exclude; the solution's layers differ from those of each.
        effort: limit that does not depend on the machine, in units of about a processor second: the integer solver's
            deterministic clock, and counts of the other searches (``Settings.effort_...``).
        begin: plan and cuts of the same pipeline under another memory limit, to start from.

    Raises:
        InfeasiblePlan: no plan fits; the message names the tightest stage of the best simple split.
        NoneBelow: proved that no plan takes less than ``below``, or that none fits.
        StoppedEarly: a limit was reached before a plan was found.
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
    """Return whether any plan fits with ``extra`` added to every stage's limit. Raises ``StoppedEarly``."""
    master = IntegerMaster(replace(problem, memory_limit=tuple(limit + extra for limit in problem.memory_limit)), 0)
    master.model.clear_objective()
    status, _, placements = master.solve(time_limit_s, 0, None, None, None)
    if status == "unknown":
        raise nothing_found(time_limit_s, 0)
    return bool(placements)
