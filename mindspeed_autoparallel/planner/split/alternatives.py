"""The next best plans. A chain enumerates paths in order of their bounds and simulates each before returning it."""

from __future__ import annotations

import heapq
import time

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split.bounds.paths import Paths
from mindspeed_autoparallel.planner.split.bounds.relaxation import cut_of
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.ranges import Chain, is_chain
from mindspeed_autoparallel.planner.split.model.solution import Placement, SplitSolution, StoppedEarly
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.planner.split.solver import solve
from mindspeed_autoparallel.planner.split.strategies.chain_solver import first_cuts


def best_plans(
    problem: SplitProblem, best: SplitSolution, count: int, time_limit_s: float
) -> tuple[list[tuple[Placement, int]], bool]:
    """Return up to ``count`` plans that differ in their layers, fastest first, and whether no other plan is faster.

    The first one is ``best``, the solution of ``problem``. Each plan recomputes the least that makes its layers fit.
    """
    deadline = time.monotonic() + time_limit_s
    if is_chain(problem):
        return _best_paths(problem, best.step_time, count, deadline)
    found, complete = [best], best.status == "optimal"
    while len(found) < count and complete:
        left = max(0.1, deadline - time.monotonic())
        try:
            found.append(solve(problem, time_limit_s=left, excluded=[item.placement for item in found]))
        except InfeasiblePlan as error:
            complete = not isinstance(error, StoppedEarly)
            break
        complete = found[-1].status == "optimal"
    return [(item.placement, item.step_time) for item in found], complete


def _best_paths(
    problem: SplitProblem, step_time: int, count: int, deadline: float
) -> tuple[list[tuple[Placement, int]], bool]:
    chain, cuts = Chain(problem), first_cuts(problem)
    found: list[tuple[Placement, int]] = []
    for slack in SETTINGS.alternatives_slacks:
        limit = step_time + int(step_time * slack)
        paths = Paths(chain.ranges(limit), chain.num_layers)
        for stage, ranges in enumerate(paths.ranges):
            chain.recompute(stage, ranges)
        paths.cuts = cuts
        if not paths.weigh() or not paths.prune(limit):
            continue
        plans, complete = _in_order(problem, chain, paths, limit, count, deadline)
        if len(plans) >= len(found):
            found = plans
        if len(found) == count or not complete:
            return found, complete
    return found, True


def _in_order(
    problem: SplitProblem, chain: Chain, paths: Paths, limit: int, count: int, deadline: float
) -> tuple[list[tuple[Placement, int]], bool]:
    num = len(paths.ranges)
    learned: dict[Cut, None] = {}
    found: list[tuple[Placement, int]] = []
    # Bound, stages left (complete plans first), insertion order, layers placed up to each stage, value under every cut,
    # plan.
    heap: list[tuple[int, int, int, tuple[int, ...], object, Placement | None]] = [
        (paths.bound(), num, 0, (), paths.constant, None)
    ]
    arrived = expanded = 0
    while heap and len(found) < count:
        bound, left, _, ends, value, placement = heapq.heappop(heap)
        if placement is not None:
            found.append((placement, bound))
            continue
        expanded += 1
        if expanded > SETTINGS.alternatives_most_expanded or time.monotonic() > deadline:
            break
        arrived += 1
        if not left:
            placement = chain.placement(list(ends))
            cut, length = cut_of(problem, placement)
            learned[cut] = None
            if length <= limit:
                heapq.heappush(heap, (int(length), -1, arrived, ends, value, placement))
            continue
        stage, ranges = num - left, paths.ranges[num - left]
        low, high = ranges.start.searchsorted([ends[-1] if ends else 0, (ends[-1] if ends else 0) + 1])
        values = value + paths.cost[stage][low:high]
        bounds = (values + paths.to_end[stage + 1][ranges.end[low:high]]).max(axis=1)
        for index in (bounds <= limit).nonzero()[0]:
            arrived += 1
            end = int(ranges.end[low + index])
            heapq.heappush(heap, (int(bounds[index]), left - 1, arrived, (*ends, end), values[index], None))
    # The next, wider search starts with the cuts of the simulated plans.
    paths.cuts.update(learned)
    return found, expanded <= SETTINGS.alternatives_most_expanded and time.monotonic() <= deadline
