"""Search of the interleaved schedule's group size (consecutive microbatches of one chunk) together with the split.

Larger groups give messages more time to overlap and hold more microbatches in flight.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem, fullest_moments
from mindspeed_autoparallel.planner.split.model.solution import (
    NoneBelow,
    Placement,
    SplitSolution,
    StoppedEarly,
    fits,
    stage_memory,
    time_of,
)
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.planner.split.solver import solve
from mindspeed_autoparallel.planner.split.state import Beginning
from mindspeed_autoparallel.schedule import group_sizes, make_program


@dataclass(frozen=True, kw_only=True)
class TriedSize:
    """The result for one group size."""

    size: int
    step_time: int | None
    """Step time of its best plan; ``None`` if no plan faster than the best of earlier sizes was found."""
    lower_bound: int
    """Lower bound of the step time of its plans, at most the best step time of earlier sizes."""
    was_searched: bool = True
    """Whether the search of this size found a bound before time ended."""


@dataclass(frozen=True, kw_only=True)
class GroupSizeSolution:
    """The best of all group sizes; the solution's bound is the least of ``tried``."""

    problem: SplitProblem
    """The problem with the group size of the solution."""
    solution: SplitSolution
    tried: tuple[TriedSize, ...]


def sizes_to_try(num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return at most ``SETTINGS.groups_most_sizes`` of the legal group sizes, spread by ratio, smallest first."""
    legal = group_sizes(num_stages, num_microbatches)
    if len(legal) <= SETTINGS.groups_most_sizes:
        return legal
    ratio = legal[-1] / legal[0]
    wanted = (legal[0] * ratio ** (k / (SETTINGS.groups_most_sizes - 1)) for k in range(SETTINGS.groups_most_sizes))
    return tuple(sorted({min(legal, key=lambda size: abs(math.log(size / goal))) for goal in wanted}))


def with_group_size(problem: SplitProblem, size: int) -> SplitProblem:
    """Return the problem with group size ``size``, and the microbatches in flight of that schedule."""
    moments = problem.in_flight
    if moments:
        program = make_program("interleaved", problem.num_stages, problem.num_microbatches, problem.num_chunks, size)
        moments = fullest_moments(program)
    return replace(problem, microbatch_group_size=size, in_flight=moments)


def solve_group_sizes(problem: SplitProblem, *, time_limit_s: float, seed: int = 0) -> GroupSizeSolution:
    """Return the fastest plan over ``sizes_to_try``; its lower bound holds for the sizes that were searched.

    Raises ``InfeasiblePlan`` if no plan fits with the smallest group size.
    """
    deadline = time.monotonic() + time_limit_s
    smallest, *others = sizes_to_try(problem.num_stages, problem.num_microbatches)
    best_problem = with_group_size(problem, smallest)
    best = solve(
        best_problem, time_limit_s=SETTINGS.groups_first_share * time_limit_s if others else time_limit_s, seed=seed
    )
    tried = [TriedSize(size=smallest, step_time=best.step_time, lower_bound=best.lower_bound)]
    problems = {size: with_group_size(problem, size) for size in others}
    for size in sorted(others, key=lambda size: _promise(problems[size], best.placement)):
        left = (deadline - time.monotonic()) / 2
        if left < SETTINGS.groups_least_seconds:
            tried.append(TriedSize(size=size, step_time=None, lower_bound=0, was_searched=False))
            continue
        found, bound = _solved_below(problems[size], best, left, seed)
        step = found.step_time if found else None
        # Without a bound, the size counts as not searched.
        tried.append(TriedSize(size=size, step_time=step, lower_bound=bound, was_searched=bound > 0))
        if found is not None and found.step_time < best.step_time:
            best_problem, best = problems[size], found
    seconds = time.monotonic() - deadline + time_limit_s
    lower = min(best.step_time, *(one.lower_bound for one in tried if one.was_searched))
    proved = lower >= best.step_time and all(one.was_searched for one in tried)
    status = "optimal" if proved else "feasible"
    best = replace(best, lower_bound=lower, status=status, solve_seconds=seconds)
    return GroupSizeSolution(problem=best_problem, solution=best, tried=tuple(sorted(tried, key=lambda one: one.size)))


def _promise(problem: SplitProblem, placement: Placement) -> tuple[bool, float]:
    """Return the sort key of a group size: whether ``placement`` overruns memory, and its step time."""
    return not fits(problem, placement), time_of(problem, placement)


def _solved_below(
    problem: SplitProblem, best: SplitSolution, seconds: float, seed: int
) -> tuple[SplitSolution | None, int]:
    """Return a plan faster than ``best`` or ``None``, and a lower bound of the step time."""
    overruns, step = _promise(problem, best.placement)
    begin = None if overruns else Beginning(placement=best.placement, cuts=())
    try:
        found = solve(problem, time_limit_s=seconds, seed=seed, below=best.step_time, begin=begin)
    except NoneBelow:
        return None, best.step_time
    except StoppedEarly as error:
        # The best plan may itself be faster in this order of microbatches.
        return _same_plan(problem, best, int(step)) if not overruns else None, error.lower_bound
    except InfeasiblePlan:
        return None, best.step_time
    return found, found.lower_bound


def _same_plan(problem: SplitProblem, best: SplitSolution, step: int) -> SplitSolution | None:
    if step >= best.step_time:
        return None
    memory = stage_memory(problem, best.placement)
    return replace(best, step_time=step, stage_memory=memory, status="feasible", cuts=())
