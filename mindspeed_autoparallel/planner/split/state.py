"""The state of one solve: problem, limits, best plan, lower bound, and the cuts that later strategies start with.

Strategies change it through ``offer`` and ``raise_bound``. It is ``closed`` once no faster plan exists, and ``done``
once later strategies are to be skipped.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from math import ceil, inf

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split.heuristics.baselines import baselines
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.solution import (
    NoneBelow,
    Placement,
    SplitSolution,
    StoppedEarly,
    stage_memory,
    tick_of,
)
from mindspeed_autoparallel.planner.split.settings import SETTINGS

LONGEST = 2**56
"""Longest step in ticks, so that 64-bit sums do not overflow."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to stop; see ``solver.solve``."""

    time_limit_s: float = 60.0
    below: int | None = None
    """Accept only plans with a smaller step time."""
    effort: float | None = None
    seed: int = 0
    started: float = field(default_factory=lambda: time.monotonic())  # looked up late: benchmarks replace the clock

    @property
    def deadline(self) -> float:
        """Return when the time limit ends, in seconds of the monotonic clock."""
        return self.started + self.time_limit_s

    def after(self, share: float) -> float:
        """Return when ``share`` of the time limit is over, in seconds of the monotonic clock."""
        return self.started + share * self.time_limit_s

    @property
    def most_effort(self) -> float:
        """Return ``effort``, or infinity without a limit."""
        return inf if self.effort is None else self.effort


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Plan and cuts to start from, of the same pipeline under another memory limit."""

    placement: Placement | None = None
    cuts: tuple[Cut, ...]


@dataclass(kw_only=True)
class State:
    """State of one solve. Times are in the units of the problem; ``step_time`` is -1 without a plan."""

    problem: SplitProblem
    limits: Limits
    excluded: tuple[Placement, ...] = ()
    """Plans that the solution must differ from."""
    begin: Beginning | None = None
    placement: Placement | None = None
    step_time: int = -1
    lower_bound: int = 0
    cuts: tuple[Cut, ...] = ()
    """Critical paths found so far; each is a lower bound for every plan."""
    rounds: int = 0
    done: bool = False
    by_stages: bool = False
    """Whether the strategy for parallel branches has searched the stages."""

    @functools.cached_property
    def unit(self) -> int:
        """Return the tick: every step is a whole multiple of it."""
        return tick_of(self.problem)

    @property
    def limit(self) -> float:
        """Return the step time that a better plan must undercut; infinite if any plan is better."""
        below = inf if self.limits.below is None else self.limits.below
        return below if self.placement is None else min(below, self.step_time)

    def offer(self, placement: Placement, step_time: float) -> bool:
        """Keep a plan if its step time is below ``limit``. Return whether it was kept."""
        if step_time >= self.limit:
            return False
        self.placement, self.step_time = placement, int(step_time)
        return True

    def raise_bound(self, bound: float) -> None:
        """Raise the lower bound to ``bound``, rounded up to whole ticks, if that is higher."""
        whole = ceil(bound * (1 - 1e-12)) if isinstance(bound, float) else bound
        self.lower_bound = max(self.lower_bound, -(-whole // self.unit) * self.unit)

    @property
    def closed(self) -> bool:
        """Return whether it is proved that no plan has a step time below ``limit``."""
        return self.lower_bound >= self.limit

    def solution(self) -> SplitSolution:
        """Return the best plan. Without one, raise ``no_plan()`` if that is proved, else ``StoppedEarly``."""
        if self.placement is None:
            raise self.no_plan() if self.closed else self.nothing_found()
        return SplitSolution(
            status="optimal" if self.closed else "feasible",
            placement=self.placement,
            step_time=self.step_time,
            lower_bound=min(self.lower_bound, self.step_time),
            stage_memory=stage_memory(self.problem, self.placement),
            rounds=self.rounds,
            solve_seconds=time.monotonic() - self.limits.started,
            cuts=self.cuts[: SETTINGS.solve_cuts_kept] if self.problem.num_chunks > 1 else (),
        )

    def nothing_found(self) -> StoppedEarly:
        """Return the error of a solve that ends with neither a plan nor a proof that none exists."""
        return nothing_found(self.limits.time_limit_s, self.lower_bound)

    def no_plan(self) -> InfeasiblePlan:
        """Return the error of a proof: no plan takes less than ``below``, or, without ``below``, no plan fits."""
        if self.limits.below is None:
            return self.infeasible()
        return NoneBelow(f"no plan takes less than {self.limits.below}.")

    def infeasible(self) -> InfeasiblePlan:
        """Return the error for a problem without a plan; names the tightest stage of the best baseline."""
        problem = self.problem
        tightest, over = 0, None
        for baseline in baselines(problem):
            used = stage_memory(problem, baseline.placement)
            excess = [size - limit for size, limit in zip(used, problem.memory_limit, strict=True)]
            if over is None or max(excess) < over:
                over = max(excess)
                tightest = excess.index(over)
        low = problem.memory_limit[tightest]
        error = InfeasiblePlan(
            f"no plan fits. In the best simple split stage {tightest} is tightest: {low + max(0, over or 0)} where "
            f"{low} is allowed, with as much recomputation as helps. Raise the memory limit or the pipeline size."
        )
        error.tightest_stage, error.excess = tightest, max(0, over or 0)  # type: ignore[attr-defined]  # read by the command
        return error


def nothing_found(time_limit_s: float, lower_bound: int) -> StoppedEarly:
    """Return the error of a search that ended without a plan; ``lower_bound`` is that of every plan."""
    error = StoppedEarly(
        f"no plan was found within the time limit of {time_limit_s:g} s, and none was proved impossible. Raise it."
    )
    error.lower_bound = lower_bound
    return error
