"""The search over layouts: the state of each layout, and the next task."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from mindspeed_autoparallel.planner.best_first import EXACT, Open, Progress, Search, bounded_reason
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.bounds import expected_us
from mindspeed_autoparallel.planner.layouts.plain_search import PlainSearch
from mindspeed_autoparallel.planner.layouts.rank_looks import bound_by_ranks, raise_smallest
from mindspeed_autoparallel.planner.layouts.tasks import IMPROVE, SIMPLE, SOLVE, Outcome, SolvedLayout, Task
from mindspeed_autoparallel.planner.layouts.turns import Looks, is_quick, turn_of
from mindspeed_autoparallel.planner.layouts.workers import Workers
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.spec.plan_records import ROUNDING, Verdict

GROUP, GIVEN_UP_S = 4, 2.0
"""Layouts per group; seconds for the bounds of layouts that timed out."""
MANY_LAYOUTS, MANY_GROUPS = 64, 6
"""With at least this many layouts the most promising ones come first, and simple splits of up to this many groups are
tried until one fits, if no plain recipe is known."""
EFFORT, FIRST_EFFORT = 2.0, 0.2
"""The solver's effort on one layout, in machine-independent seconds; that of a first plan with virtual stages."""


class LayoutSearch(Search[Candidate]):
    """Searches layouts: proves the best plan first, then as many of the next best as requested."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        bounds_us: Sequence[float],
        *,
        workers: Workers,
        deadline: float,
        num_alternatives: int,
        progress: Progress,
    ) -> None:
        self.found: dict[str, SolvedLayout] = {}
        self.verdicts: list[Verdict] = []
        self.without_plan: list[Candidate] = []
        """Layouts in which no plan fits or none was found."""
        self.open_bounds_us: dict[str, float] = {}
        """Layouts that time or effort left open."""
        # Chains come first: their proofs are quick. Layouts with virtual stages follow, the most promising first.
        self.looks = Looks()
        self.items = [
            Open(turn_of(item, expected_us(item)), bound, order, item)
            for order, (item, bound) in enumerate(zip(candidates, bounds_us, strict=True))
        ]
        self._simple: dict[str, SolvedLayout] = {}
        self._begin_from: dict[str, ModulePlacement] = {}
        self._beaten: list[Open[Candidate]] = []
        self._bounds: dict[str, Open[Candidate]] = {}
        self._given_up: list[Open[Candidate]] = []
        self._workers, self._deadline, self._progress = workers, deadline, progress
        self.bounds_s, self.known_us = 0.0, inf
        """Processor seconds after the deadline for the bounds of open layouts; step time of a known plan of other
        layouts."""
        self.plain = PlainSearch(workers, lambda found: self.know(found.candidate, found.outcome))
        self.interrupt: KeyboardInterrupt | None = None
        """The interrupt that ended the search early."""
        self._num_alternatives, self._proving = num_alternatives, True

    @property
    def best_us(self) -> float:
        """Return the step time of the best plan known, of these layouts or of others."""
        steps = (found.step_us for found in (*self.found.values(), *self._simple.values()))
        return min(self.known_us, min(steps, default=inf))

    def settled_bound_us(self) -> float:
        """Return the smallest bound of the layouts that ended without a proof; it also bounds the answer."""
        solved = (found.outcome.lower_bound_us for found in self.found.values())
        return min([*self.open_bounds_us.values(), *solved], default=inf)

    def know(self, candidate: Candidate, outcome: Outcome) -> None:
        """Record a plan found elsewhere: the search begins from it and, if it fits, must beat it."""
        assert outcome.placement is not None
        self._begin_from[candidate.layout.label()] = outcome.placement
        if outcome.fits:
            self._offer(SolvedLayout(candidate=candidate, outcome=outcome))

    def begin_from(self, plan: Plan) -> None:
        """Start from ``plan``, whose layout is one of these, and from the bounds that its search proved."""
        proved = {verdict.layout.label(): verdict.lower_bound_us or 0.0 for verdict in plan.search.verdicts}
        self.items = [replace(item, bound_us=max(item.bound_us, proved.get(_label(item), 0.0))) for item in self.items]
        outcome = Outcome(placement=ModulePlacement.of_plan(plan), step_us=plan.step.total_us)
        for item in self.items:
            if item.item.layout == plan.layout:
                self.know(item.item, outcome)

    def _offer(self, found: SolvedLayout) -> None:
        """Keep a plan unless a faster one of its layout is known."""
        label = found.candidate.layout.label()
        if label not in self._simple or found.step_us < self._simple[label].step_us:
            self._simple[label] = found

    def unsettled(self) -> list[Open[Candidate]]:
        """Return the layouts without a verdict, for a search that was interrupted."""
        settled = {verdict.layout.label() for verdict in self.verdicts} | {_label(item) for item in self._beaten}
        return [self._bounds.get(_label(item), item) for item in self.items if _label(item) not in settled]

    def warm_up(self) -> None:
        """Evaluate simple splits of the most promising layouts, for pruning."""
        first, cutoff_us = max(GROUP, min(4 * GROUP, self._num_alternatives + 1)), self.cutoff_us()
        most = MANY_GROUPS * GROUP if self.looks.many and self.best_us == inf else first
        likely = heapq.nsmallest(most, [item for item in self.items if item.bound_us < cutoff_us])
        for group in (likely[:first], *(likely[at : at + GROUP] for at in range(first, len(likely), GROUP))):
            seconds = self._deadline - time.monotonic()
            tasks = [Task(kind=SIMPLE, layout=one.item.layout, seconds=seconds) for one in group]
            for item, outcome in zip(group, self._workers.perform(tasks, enough=self.best_us < inf), strict=True):
                if outcome.step_us is not None:
                    self._offer(SolvedLayout(candidate=item.item, outcome=outcome))
            if self.best_us < inf:
                return

    def bound_by_ranks(self, deadline: float) -> list[Open[Candidate]]:
        """Raise bounds by ranks alone until ``deadline``; return the layouts that remain unsettled."""
        self.items = bound_by_ranks(self._workers, self.items, self.cutoff_us(), deadline)
        return self._possible(self.items)

    def _possible(self, items: list[Open[Candidate]]) -> list[Open[Candidate]]:
        """Settle layouts in which no plan fits, and return the others."""
        for item in (one for one in items if one.bound_us == inf):
            self._too_full(item)
        return [item for item in items if item.bound_us < inf]

    def cutoff_us(self) -> float:
        """Return the best step time, or that of the last requested alternative."""
        return self.best_us * (1 - EXACT) if self._proving else self._threshold_of_alternatives()

    def admits(self, item: Open[Candidate], cutoff_us: float) -> bool:
        """Return whether to solve a layout; if it cannot be the best, only if that is quick."""
        if self._proving and self.looks.seconds_left(item, self.best_us) <= 0:
            return False
        return item.bound_us < cutoff_us and (self._proving or is_quick(item.item, item.late))

    def discard(self, item: Open[Candidate]) -> None:
        """Keep a layout that the best plan beats: it may be the next best."""
        open_yet = item.bound_us < self.best_us * (1 - ROUNDING)
        if self._proving and open_yet and self.looks.seconds_left(item, self.best_us) <= 0:
            self._given_up.append(item)
        elif self._proving:
            self._beaten.append(item)
        else:
            self._bounded(item)

    def next_round(self) -> list[Open[Candidate]]:
        """Return the beaten layouts once the proof of the best plan is complete."""
        for item in self._raised(self._given_up, GIVEN_UP_S):
            self._leave(item)
        self._given_up.clear()
        self._proving, beaten, self._beaten = False, self._beaten, []
        return beaten

    def expand(self, group: Sequence[Open[Candidate]], cutoff_us: float) -> list[Open[Candidate]]:
        """Solve the layouts of a group, each for a plan faster than ``cutoff_us``."""
        seconds, left = self._deadline - time.monotonic(), []
        tasks = [
            Task(
                kind=self.looks.kind(item),
                layout=item.item.layout,
                seconds=min(seconds, self.looks.seconds(item, self.best_us)),
                effort=FIRST_EFFORT if self.looks.kind(item) == IMPROVE else EFFORT,
                cutoff_us=cutoff_us if cutoff_us < inf else None,
                only_faster=True,
                placement=self._begin_from.get(_label(item)),
                bound_us=item.bound_us,
            )
            for item in group
        ]
        for item, outcome in zip(group, self._workers.perform(tasks), strict=True):
            self.looks.spent(item, outcome.processor_s)
            if outcome.proved_infeasible:
                self._too_full(item)
            elif self.looks.kind(item) != SOLVE and not outcome.beaten:
                self.looks.advance(item)
                if (again := self._to_look_at_again(item, outcome)) is not None:
                    left.append(again)
                    self._bounds[_label(item)] = again
                else:
                    self._solved(item, outcome)
            else:
                self._solved(item, outcome)
        return left

    def _too_full(self, item: Open[Candidate]) -> None:
        self._settle(item, "memory", "no split fits in memory, with any recomputation.")
        self.without_plan.append(item.item)

    def _to_look_at_again(self, item: Open[Candidate], outcome: Outcome) -> Open[Candidate] | None:
        """Keep a task's result, and return the layout with its proved bound; ``None``: it is settled."""
        bound = max(item.bound_us, outcome.lower_bound_us)
        if outcome.step_us is not None:
            if bound >= outcome.step_us * (1 - ROUNDING):
                return None
            if outcome.step_us < self.best_us:
                self._progress(f"{_label(item)}: {outcome.step_us / 1000:.2f} ms, at least {bound / 1000:.2f} ms")
            self._offer(SolvedLayout(candidate=item.item, outcome=outcome))
        return self.looks.later(item, bound)

    def _leave(self, item: Open[Candidate]) -> None:
        """Settle a layout whose time is over with its current result."""
        simple = self._simple.get(_label(item))
        if simple is not None:
            self._keep(item, replace(simple, outcome=replace(simple.outcome, lower_bound_us=item.bound_us)))
        else:
            self._left_open(item, item.bound_us)

    def _threshold_of_alternatives(self) -> float:
        steps = sorted(found.step_us for found in {**self._simple, **self.found}.values())
        return steps[self._num_alternatives] * (1 - EXACT) if len(steps) > self._num_alternatives else inf

    def _solved(self, item: Open[Candidate], outcome: Outcome) -> None:
        before, bound = self.best_us, max(item.bound_us, outcome.lower_bound_us)
        simple = self._simple.get(_label(item))
        if outcome.step_us is None and simple is not None and not outcome.beaten:
            outcome = simple.outcome
        if outcome.step_us is None:
            if outcome.beaten and self._proving:
                self._beaten.append(replace(item, bound_us=bound))
            elif outcome.beaten:
                self._bounded(replace(item, bound_us=bound))
            else:
                self._left_open(item, bound)
                self.without_plan.append(item.item)
            return
        bound = min(outcome.step_us, bound)
        if outcome.step_us < before or not self.found:
            self._progress(f"{_label(item)}: {outcome.step_us / 1000:.2f} ms, at least {bound / 1000:.2f} ms")
        self._keep(item, SolvedLayout(candidate=item.item, outcome=replace(outcome, lower_bound_us=bound)))

    def _keep(self, item: Open[Candidate], found: SolvedLayout) -> None:
        bound = found.outcome.lower_bound_us
        self.found[_label(item)] = found
        self._settle(item, "solved", f"solved; bound {bound / 1000:.3f} ms.", bound_us=bound, step_us=found.step_us)

    def _left_open(self, item: Open[Candidate], bound: float) -> None:
        self.open_bounds_us[_label(item)] = bound
        self._settle(item, "unsolved", "no plan was found in time, and none was proved impossible.", bound_us=bound)

    def stop(self, left: list[Open[Candidate]]) -> None:
        """Leave open the layouts that may still win; simple splits count as plans."""
        if self.interrupt is None:
            left = self._raised([*left, *self._given_up])
        best = self.best_us
        for label, simple in self._simple.items():
            if simple.step_us <= best and label not in self.found:
                bound = min([item.bound_us for item in left if _label(item) == label], default=0.0)
                self.found[label] = replace(simple, outcome=replace(simple.outcome, lower_bound_us=bound))
        for item in left:
            found = self.found.get(_label(item))
            if found is not None:
                reason = "the time limit came before a proof."
                self._settle(item, "solved", reason, bound_us=item.bound_us, step_us=found.step_us)
            elif item.bound_us < best * (1 - ROUNDING):
                self._left_open(item, item.bound_us)
            else:
                self._bounded(item)
        for item in self._beaten:
            self._bounded(item)

    def _raised(self, items: list[Open[Candidate]], most_s: float = inf) -> list[Open[Candidate]]:
        until = time.monotonic() + min(self.bounds_s, most_s)
        offer = lambda item, outcome: self._offer(SolvedLayout(candidate=item.item, outcome=outcome))
        return self._possible(raise_smallest(self._workers, items, self.best_us, until, offer))

    def _bounded(self, item: Open[Candidate]) -> None:
        simple = self._simple.get(_label(item))
        if simple is not None and simple.step_us * (1 - EXACT) ** 2 <= item.bound_us:
            # No plan of this layout is faster than its simple split.
            bound = min(item.bound_us, simple.step_us)
            self._keep(item, replace(simple, outcome=replace(simple.outcome, lower_bound_us=bound)))
            return
        self._settle(item, "bounded", bounded_reason(item.bound_us, self.best_us), bound_us=item.bound_us)

    def _settle(
        self,
        item: Open[Candidate],
        outcome: str,
        reason: str,
        *,
        bound_us: float | None = None,
        step_us: float | None = None,
    ) -> None:
        self.verdicts.append(
            Verdict(layout=item.item.layout, outcome=outcome, reason=reason, lower_bound_us=bound_us, step_us=step_us)
        )


def _label(item: Open[Candidate]) -> str:
    return item.item.layout.label()
