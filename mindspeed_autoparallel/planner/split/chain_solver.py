"""Chains, without an integer solver: search the layered graph under the cuts known, simulate, cut again."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.split.paths import Labels, Paths
from mindspeed_autoparallel.planner.split.problem import SplitProblem
from mindspeed_autoparallel.planner.split.ranges import Chain
from mindspeed_autoparallel.planner.split.relaxation import Cut, cut_of
from mindspeed_autoparallel.planner.split.solution import Placement, longest_step, tick_of
from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate

BEAM = 100
SIMULATED = 4
"""Plans simulated per round: each may bring a cut."""
FIRST_SHARE = 0.1
"""Of the open interval: where the first plan is asked for."""
LONGEST = 2**56


@dataclass(frozen=True, kw_only=True)
class ChainSolution:
    """``placement`` is ``None`` when there is no plan (``complete``) or none was found in time."""

    placement: Placement | None
    step_time: int
    lower_bound: int
    rounds: int
    complete: bool


def solve_chain(problem: SplitProblem, known: Placement | None, deadline: float) -> ChainSolution:
    """The fastest plan of a chain; ``known``: a plan that fits. Raises ``ConfigError`` for a tick too fine."""
    if longest_step(problem) > LONGEST:
        raise ConfigError("the step is too long for the tick chosen: use coarser times.")
    return _Search(problem, known, deadline).run()


class _Search:
    def __init__(self, problem: SplitProblem, known: Placement | None, deadline: float) -> None:
        self.problem, self.deadline = problem, deadline
        self.chain, self.unit = Chain(problem), tick_of(problem)
        self.best: Placement | None = None
        self.best_time, self.rounds = 2 * LONGEST, 0
        first = first_cuts(problem)
        if known is not None:
            # The same layers, with the least recomputation that fits.
            self.best = self.chain.placement(self.chain.ends_of(known))
            cut, length = cut_of(problem, self.best)
            self.best_time = int(length)
            first[cut] = None
        self.paths = Paths(self.chain.ranges(self.best_time), self.chain.num_layers)
        self.paths.cuts = first

    def run(self) -> ChainSolution:
        paths = self.paths
        if not paths.weigh() or not paths.prune(self.best_time):
            return self._result(self.best_time, complete=True)
        for stage, ranges in enumerate(paths.ranges):
            self.chain.recompute(stage, ranges)
        if not paths.weigh() or not paths.prune(self.best_time):
            return self._result(self.best_time, complete=True)
        self.lower = paths.bound()
        share = FIRST_SHARE
        while self.lower < self.best_time and time.monotonic() < self.deadline:
            # Ask for a plan in the lowest part of what is open: few arcs are left there, whatever the answer.
            target = min(self._limit(), self.lower + int((self.best_time - self.lower) * share))
            before = self.best_time
            if self._none_within(target):
                self.lower = max(self.lower, -(-(target + 1) // self.unit) * self.unit)
                share = min(1.0, 2 * share)
            elif self.best_time > target:
                break
            if self.best_time < before and not (paths.weigh() and paths.prune(self._limit())):
                self.lower = self.best_time
        return self._result(self.lower, complete=self.lower >= self.best_time)

    def _none_within(self, target: int) -> bool:
        """Whether no plan takes at most ``target``; if not, one was found, or time is up."""
        while True:
            paths = self.paths.copy()
            if not paths.weigh() or not paths.prune(target):
                return True
            labels = paths.beam(BEAM, target)
            while len(labels) and self._visit(paths, labels):
                if self.best_time <= target:
                    return False
                if time.monotonic() > self.deadline:
                    return False
                if not paths.weigh() or not paths.prune(target):
                    return True
                labels = paths.beam(BEAM, target)
            labels, rest = paths.all_paths(target, self.deadline)
            if not len(labels):
                self.lower = max(self.lower, min(rest, self.best_time))
                return rest > target
            self._visit(paths, labels)
            if self.best_time <= target or time.monotonic() > self.deadline:
                return False

    def _limit(self) -> int:
        """Only what is faster than the best plan is of interest."""
        return self.best_time - self.unit

    def _visit(self, paths: Paths, labels: Labels) -> bool:
        """Simulate the most promising plans and keep the best; whether anything was learned."""
        self.rounds += 1
        learned = False
        for row in labels.arcs[:SIMULATED]:
            ends = [int(paths.ranges[stage].end[arc]) for stage, arc in enumerate(row)]
            placement = self.chain.placement(ends)
            cut, length = cut_of(self.problem, placement)
            if cut not in self.paths.cuts:
                self.paths.cuts[cut] = None
                learned = True
            if length < self.best_time:
                self.best, self.best_time = placement, int(length)
                learned = True
        return learned

    def _result(self, lower: int, *, complete: bool) -> ChainSolution:
        lower = self.best_time if complete else min(-(-lower // self.unit) * self.unit, self.best_time)
        return ChainSolution(
            placement=self.best, step_time=self.best_time, lower_bound=lower, rounds=self.rounds, complete=complete
        )


def first_cuts(problem: SplitProblem) -> dict[Cut, None]:
    """The critical paths of an even pipeline, and of one with each stage in turn twice as slow."""
    num = problem.num_stages
    even = [
        max(1, sum(s.num_layers * s.forward for s in problem.segments) // num),
        max(1, sum(s.num_layers * s.backward for s in problem.segments) // num),
    ]
    program = make_program(problem.schedule, num, problem.num_microbatches, problem.num_chunks)
    found: dict[Cut, None] = {}
    for slow in [None, *range(num)]:
        forward, backward = ([time * (1 + (stage == slow)) for stage in range(num)] for time in even)
        times = StepTimes(forward=forward, backward=backward, link=problem.link, per_operation=problem.per_operation)
        step = simulate(program, times, rendezvous=problem.rendezvous, sends=problem.sends)
        path = sum(n * t for n, t in zip(step.num_forwards, forward, strict=True))
        path += sum(n * t for n, t in zip(step.num_backwards, backward, strict=True))
        tail = -1 if not problem.tails else num - 1 if slow is None else slow
        found[step.num_forwards, step.num_backwards, int(step.step_time) - path, tail] = None
    return found
