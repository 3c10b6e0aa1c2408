"""The bottlenecks of a plan, and the least increase of the memory limit with which any plan fits."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.ranges import Chain, is_chain
from mindspeed_autoparallel.planner.split.model.solution import SplitSolution, stage_times, step_of
from mindspeed_autoparallel.planner.split.solver import fits_within


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The composition of the step's critical path, and the stages where memory costs time."""

    slowest_stage: int
    """The stage that holds the largest share of the critical path."""
    share_of_stage: tuple[float, ...]
    """Share of the step, by stage: its computation on the critical path."""
    share_of_messages: float
    recomputing_stages: tuple[int, ...]
    """Stages that recompute layers to fit."""


def limits_of(problem: SplitProblem, solution: SplitSolution) -> Limits:
    """Return shares of the critical path that add up to 1; host time per operation counts for its stage."""
    step = step_of(problem, solution.placement)
    forward, backward = stage_times(problem, solution.placement)
    spent = [0.0] * problem.num_stages
    for v in range(problem.num_virtual):
        operations = step.num_forwards[v] + step.num_backwards[v]
        spent[v % problem.num_stages] += (
            step.num_forwards[v] * forward[v] + step.num_backwards[v] * backward[v] + operations * problem.per_operation
        )
    whole = step.step_time or 1
    slower = {
        v % problem.num_stages
        for kinds in solution.placement
        for row in kinds[1:]
        for v, count in enumerate(row)
        if count
    }
    return Limits(
        slowest_stage=max(range(problem.num_stages), key=spent.__getitem__),
        share_of_stage=tuple(time / whole for time in spent),
        share_of_messages=1 - sum(spent) / whole,
        recomputing_stages=tuple(sorted(slower)),
    )


def least_excess(problem: SplitProblem, *, resolution: int = 1, time_limit_s: float = 60.0) -> int:
    """Return the least increase of every stage's limit with which a plan fits; at 0 or less, a plan fits already.

    Exact for chains. Otherwise bisection with the integer solver gives the least multiple of ``resolution``, at least
    0; it raises ``StoppedEarly`` if its queries take longer than ``time_limit_s``.
    """
    if is_chain(problem):
        return Chain(problem).roomiest()[0]
    deadline = time.monotonic() + time_limit_s
    most = sum(
        s.num_layers * max(problem.most_memory(k, v) for k in s.kinds for v in range(problem.num_virtual))
        + max(k.transient for k in s.kinds)
        for s in problem.segments
    )
    low, high = -1, -(-most // resolution)
    while low + 1 < high:
        middle = (low + high) // 2
        if fits_within(problem, middle * resolution, deadline - time.monotonic()):
            high = middle
        else:
            low = middle
    return high * resolution
