"""Interleaved steps of very many microbatches: searched with fewer, then timed and bounded as they are.

A long step repeats the middle of a shorter one: its first and its last microbatches are the same.
"""

from __future__ import annotations

import time
from dataclasses import replace

from mindspeed_autoparallel.planner.split.bounds.relaxation import cut_of, relaxed_cuts
from mindspeed_autoparallel.planner.split.bounds.whole_ranks import whole_ranks_bound
from mindspeed_autoparallel.planner.split.model.integer_master import IntegerMaster
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.planner.split.state import State
from mindspeed_autoparallel.planner.split.strategies.virtual_stages import search_row


def with_fewer_microbatches(problem: SplitProblem) -> SplitProblem | None:
    """Return the same pipeline with a shorter step; ``None``: it is short enough."""
    per_microbatch = 2 * problem.num_virtual
    if problem.num_microbatches * per_microbatch <= SETTINGS.long_step_many:
        return None
    group = problem.microbatch_group_size or problem.num_stages
    groups = SETTINGS.long_step_fewer // per_microbatch // group
    fewer = groups * group + problem.num_microbatches % group
    return replace(problem, num_microbatches=fewer) if groups > 2 * problem.num_chunks else None


def search_long_step(state: State) -> None:
    """Find a plan of the same pipeline with a shorter step, then time and bound it in the long one."""
    problem, limits = state.problem, state.limits
    shorter = with_fewer_microbatches(problem)
    if shorter is None:
        return
    deadline = limits.after(SETTINGS.solve_long_step_share)
    short = State(problem=shorter, limits=limits)
    search_row(short, limits.after(SETTINGS.solve_long_step_share * SETTINGS.long_step_searched))
    if short.placement is None:
        return
    # Sorting so many events takes seconds, whatever the time limit; only two plans are timed.
    cut, length = cut_of(problem, short.placement)
    state.offer(short.placement, length)
    state.done = True
    relaxed = relaxed_cuts(problem, deadline, known=(cut,), most_rounds=1)
    if relaxed is None:
        return
    state.raise_bound(whole_ranks_bound(problem, min(relaxed[1], state.step_time), state.step_time))
    master = IntegerMaster(problem, state.lower_bound)
    for known in relaxed[0]:
        master.add(known)
    left = max(1.0, deadline - time.monotonic())
    status, bound, placements = master.solve(left, limits.seed, state.placement, state.step_time, limits.effort)
    state.raise_bound(state.step_time if status == "infeasible" else min(bound, state.step_time))
    for other in placements[-1:]:
        state.offer(other, cut_of(problem, other)[1])
