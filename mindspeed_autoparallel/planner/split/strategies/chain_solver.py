"""Chains, without an integer solver: search the layered graph under the known cuts, simulate plans, add their cuts."""

from __future__ import annotations

import time

import numpy

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.split.bounds.divisions import halves
from mindspeed_autoparallel.planner.split.bounds.paths import Labels, Paths
from mindspeed_autoparallel.planner.split.bounds.relaxation import cut_of
from mindspeed_autoparallel.planner.split.heuristics.baselines import best_baseline
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.ranges import NEVER, Array, Chain
from mindspeed_autoparallel.planner.split.model.solution import longest_step, step_at
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.planner.split.state import LONGEST, State


def search_chain(state: State) -> None:
    """Find the fastest plan of a chain by labels, stage after stage.

    ``Limits.effort`` limits the labels of one query; the gap stays open if it needs more. Raises ``InfeasiblePlan`` if
    proved, ``ConfigError`` if ticks are too fine for 64-bit sums.
    """
    if longest_step(state.problem) > LONGEST:
        raise ConfigError("the step has too many ticks for 64-bit sums: give times in a coarser unit.")
    _Search(state).run()
    state.done = True


class _Search:
    def __init__(self, state: State) -> None:
        self.state, self.problem, self.deadline = state, state.problem, state.limits.deadline
        self.chain = Chain(state.problem)
        self.left = 0
        """Labels left for the halves of the present query."""
        cuts = first_cuts(state.problem)
        if state.limits.below is None:
            simple = best_baseline(state.problem)
            if simple is not None:
                # The chain gives the same layers the least recomputation that fits.
                self._improve(self.chain.ends_of(simple.placement), cuts)
            else:
                overrun, ends = self.chain.roomiest()
                if overrun > 0:
                    raise state.infeasible()
                self._improve(ends, cuts)
        self.paths = Paths(self.chain.ranges(self.best_time), self.chain.num_layers)
        self.paths.cuts = cuts

    @property
    def best_time(self) -> int:
        """Return the step time that a better plan must undercut."""
        return int(min(self.state.limit, 2 * LONGEST))

    def run(self) -> None:
        """Improve plan and bound until they meet or effort or time ends."""
        paths, state = self.paths, self.state
        most = self.best_time if state.placement is not None else self._limit()
        for step in (False, True):
            for stage, ranges in enumerate(paths.ranges) if step else ():
                self.chain.recompute(stage, ranges)
            if not paths.weigh() or not paths.prune(most):
                state.raise_bound(self.best_time)
                return
        state.raise_bound(paths.bound())
        share, effort = SETTINGS.chain_first_share, SETTINGS.chain_first_effort
        most_effort = state.limits.most_effort * SETTINGS.effort_labels
        while not state.closed and effort <= most_effort and time.monotonic() < self.deadline:
            # A target just above the bound leaves few arcs, so both outcomes are cheap.
            target = min(self._limit(), state.lower_bound + int((self.best_time - state.lower_bound) * share))
            before = self.best_time
            self.left = effort
            if self._none_within(self.paths, target, effort):
                state.raise_bound(target + 1)
                share = min(SETTINGS.chain_most_share, 2 * share)
            elif self.best_time > target:
                share, effort = share / 3, 2 * effort
            if self.best_time < before and not (paths.weigh() and paths.prune(self._limit())):
                state.raise_bound(self.best_time)

    def _none_within(self, among: Paths, target: int, effort: int) -> bool:
        """Return whether it is proved that no plan ``among`` these takes at most ``target``. If not, such a plan was
        found, or effort or time ended."""
        while True:
            paths = among.copy()
            if not paths.weigh() or not paths.prune(target):
                return True
            labels = paths.beam(SETTINGS.chain_beam, target)
            while len(labels) and self._visit(paths, labels):
                if self.best_time <= target:
                    return False
                if time.monotonic() > self.deadline:
                    return False
                if not paths.weigh() or not paths.prune(target):
                    return True
                labels = paths.beam(SETTINGS.chain_beam, target)
            labels, none = paths.all_paths(target, SETTINGS.chain_quick_effort, self.deadline)
            if not none and not len(labels):
                if among is self.paths:
                    self.state.raise_bound(min(paths.bound(), target))
                if effort >= SETTINGS.chain_branching_effort:
                    two = halves(paths)
                    if two is not None:
                        self.left -= SETTINGS.chain_quick_effort
                        return self.left > 0 and all(self._none_within(half, target, effort) for half in two)
                labels, none = paths.all_paths(target, effort, self.deadline)
            if not len(labels):
                return none
            self._visit(paths, labels)
            if self.best_time <= target or time.monotonic() > self.deadline:
                return False

    def _improve(self, ends: list[int], cuts: dict[Cut, None]) -> None:
        ends, step = improve(self.problem, self.chain, ends, cuts, self.deadline)
        if step < self.best_time:
            self.state.offer(self.chain.placement(ends), step)

    def _limit(self) -> int:
        """Return the longest step time of a better plan."""
        return self.best_time - self.state.unit

    def _visit(self, paths: Paths, labels: Labels) -> bool:
        """Simulate the most promising plans and keep the best. Return whether this gave a new cut or a better plan."""
        self.state.rounds += 1
        learned = False
        for row in labels.arcs[: SETTINGS.chain_simulated]:
            ends = [int(paths.ranges[stage].end[arc]) for stage, arc in enumerate(row)]
            placement = self.chain.placement(ends)
            cut, length = cut_of(self.problem, placement)
            if cut not in paths.cuts:
                paths.cuts[cut] = self.paths.cuts[cut] = None
                learned = True
            if length < self.best_time:
                self._improve(ends, self.paths.cuts)
                learned = True
        return learned


def first_cuts(problem: SplitProblem) -> dict[Cut, None]:
    """Return the critical paths of a pipeline with equal stages, and with each stage in turn twice as slow."""
    num = problem.num_stages
    even = [
        max(1, sum(s.num_layers * s.forward for s in problem.segments) // num),
        max(1, sum(s.num_layers * s.backward for s in problem.segments) // num),
    ]
    found: dict[Cut, None] = {}
    for slow in [None, *range(num)]:
        forward, backward = ([time * (1 + (stage == slow)) for stage in range(num)] for time in even)
        step = step_at(problem, forward, backward)
        tail = -1 if not problem.tails else num - 1 if slow is None else slow
        found[Cut.of(step, forward, backward, step.step_time, tail)] = None
    return found


def improve(
    problem: SplitProblem, chain: Chain, ends: list[int], cuts: dict[Cut, None], deadline: float
) -> tuple[list[int], int]:
    """Return a plan (layers placed up to each stage) that no move of a layer improves, and its step time.

    A move shifts all boundaries between two stages. All moves are bounded by the cuts at once and the best is
    simulated; if it is not faster, its critical path becomes a cut that excludes it.
    """
    cut, length = cut_of(problem, chain.placement(ends))
    cuts[cut] = None
    step, failed = int(length), 0
    while failed < SETTINGS.chain_moves_most_tried and time.monotonic() < deadline:
        moved, value = _best_move(chain, ends, cuts)
        if value >= step:
            break
        cut, length = cut_of(problem, chain.placement(moved))
        if length < step:
            ends, step, failed = moved, int(length), 0
        elif cut in cuts:
            break
        else:
            failed += 1
        cuts[cut] = None
    return ends, step


def _best_move(chain: Chain, ends: list[int], cuts: dict[Cut, None]) -> tuple[list[int], int]:
    num = len(ends)
    starts = [0, *ends[:-1]]
    forwards: Array = numpy.array([cut.forwards for cut in cuts], dtype=numpy.int64).T
    backwards: Array = numpy.array([cut.backwards for cut in cuts], dtype=numpy.int64).T
    tails: Array = numpy.array([cut.tail_stage for cut in cuts]) == numpy.arange(num)[:, None]
    base: Array = numpy.array([cut.constant for cut in cuts], dtype=numpy.int64)

    def cost(shift_start: int, shift_end: int) -> Array:
        """Return each stage's part of every cut, ``[stage, cut]``, with shifted boundaries."""
        times = [chain.times(s, starts[s] + shift_start, ends[s] + shift_end) for s in range(num)]
        impossible = numpy.array([item is None for item in times])
        known = numpy.array([item or (0, 0, 0) for item in times], dtype=numpy.int64)
        value = forwards * known[:, :1] + backwards * known[:, 1:2] + tails * known[:, 2:]
        value[impossible] = NEVER // num
        return value

    here = cost(0, 0)
    total = base + here.sum(axis=0)
    best, found = NEVER, ends
    for shift in (-1, 1):
        last, first = cost(0, shift) - here, cost(shift, 0) - here
        between = numpy.cumsum(cost(shift, shift) - here, axis=0)
        # A move between stages i and j > i shifts boundaries i to j - 1.
        value = total + last[:, None, :] + (first + numpy.roll(between, 1, axis=0))[None, :, :] - between[:, None, :]
        worst = value.max(axis=2)
        worst[numpy.tril_indices(num)] = NEVER
        i, j = numpy.unravel_index(int(worst.argmin()), worst.shape)
        if worst[i, j] < best:
            best = int(worst[i, j])
            found = [end + shift * int(i <= s < j) for s, end in enumerate(ends)]
    return found, best
