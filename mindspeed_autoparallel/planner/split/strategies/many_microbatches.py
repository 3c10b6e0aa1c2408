"""Interleaved steps with very many microbatches: search with fewer, then simulate and bound the whole step.

A long step repeats the steady state of a shorter one; warmup and cooldown are the same.
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
    """Return the problem with fewer microbatches; ``None`` if it has few enough, or cannot have fewer."""
    per_microbatch = 2 * problem.num_virtual
    if problem.num_microbatches * per_microbatch <= SETTINGS.long_step_many:
        return None
    group = problem.microbatch_group_size or problem.num_stages
    groups = SETTINGS.long_step_fewer // per_microbatch // group
    fewer = groups * group + problem.num_microbatches % group
    return replace(problem, num_microbatches=fewer) if groups > 2 * problem.num_chunks else None


def search_long_step(state: State) -> None:
    """Find a plan with fewer microbatches, then simulate and bound it with all of them."""
    problem, limits = state.problem, state.limits
    shorter = with_fewer_microbatches(problem)
    if shorter is None:
        return
    deadline = limits.after(SETTINGS.solve_long_step_share)
    short = State(problem=shorter, limits=limits)
    search_row(short, limits.after(SETTINGS.solve_long_step_share * SETTINGS.long_step_searched))
    if short.placement is None:
        return
    # Sorting so many events takes seconds, even after the time limit, so only two plans are simulated.
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
