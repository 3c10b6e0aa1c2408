"""Critical-path cuts for any problem: an integer master program over some paths, and the simulator, which adds paths.

The master's bound never exceeds the optimum, since every cut is a path of every plan. When it equals the step time of
the best plan found, that plan is proved optimal. See docs/decisions/0006-paths-of-ranges.md.
"""

from __future__ import annotations

import time

from mindspeed_autoparallel.planner.split.bounds.relaxation import cut_of, relaxed_cuts
from mindspeed_autoparallel.planner.split.heuristics.baselines import best_baseline
from mindspeed_autoparallel.planner.split.model.integer_master import IntegerMaster
from mindspeed_autoparallel.planner.split.state import State


def search_by_integers(state: State) -> None:
    """Improve plan and bound of any problem until they meet or a limit is reached; the last strategy."""
    problem, limits = state.problem, state.limits
    below = limits.below
    relaxed = relaxed_cuts(problem, limits.after(0.5), stop_at=below, known=state.cuts)
    if relaxed is None:
        raise state.infeasible()
    cuts, bound = relaxed
    state.raise_bound(bound)
    if state.closed:
        return
    master = IntegerMaster(problem, state.lower_bound)
    for cut in cuts:
        master.add(cut)
    for placement in state.excluded:
        master.forbid(placement)
    if state.placement is None and below is None and not state.excluded:
        simple = best_baseline(problem)
        if simple is not None:
            state.offer(simple.placement, simple.step_time)
    state.rounds, state.done = 0, True
    while not state.closed:
        left = limits.deadline - time.monotonic()
        if left <= 0 or (limits.effort is not None and master.effort >= limits.effort):
            break
        state.rounds += 1
        best = state.placement
        limit = state.step_time if best is not None else None if below is None else below - 1
        status, solved_bound, placements = master.solve(left, limits.seed, best, limit, limits.effort)
        if status == "infeasible":
            if best is None:
                raise state.no_plan()
            state.raise_bound(state.step_time)
            break
        state.raise_bound(solved_bound if best is None else min(solved_bound, state.step_time))
        fresh = 0
        for placement in placements:
            cut, length = cut_of(problem, placement)
            state.offer(placement, length)
            if cut not in cuts:
                cuts[cut] = None
                master.add(cut)
                fresh += 1
        if not fresh and status != "optimal":
            break
