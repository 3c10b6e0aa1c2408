"""What is known of every layout, and what to find out next: best first, by lower bound.

Layouts are taken in groups of a fixed size, and what a group finds counts once all of it is done: so the verdicts are
the same however many processes share the work.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from mindspeed_autoparallel.planner.space import Candidate
from mindspeed_autoparallel.planner.tasks import SIMPLE, SOLVE, Outcome, Task
from mindspeed_autoparallel.spec import Model
from mindspeed_autoparallel.spec.plan import Verdict

GROUP = 4
EFFORT = 2.0
"""Of the integer solver on one layout, in its own machine-independent seconds."""
FEW_OPERATIONS = 20_000
"""Forwards and backwards of a step: longer ones are simulated to prove the best plan, not to rank those behind it."""
EXACT = 1e-9
"""Relative difference below which two step times are the same."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan that fits."""

    candidate: Candidate
    outcome: Outcome

    @property
    def step_us(self) -> float:
        """Of the plan."""
        assert self.outcome.step_us is not None
        return self.outcome.step_us


@dataclass(order=True)
class Open:
    """A layout that is not settled."""

    hard: bool
    """No chain with one chunk per stage: these are proved in a moment, and then bound the others."""
    bound_us: float
    order: int
    candidate: Candidate = field(compare=False)

    @property
    def is_quick(self) -> bool:
        """Worth solving although it cannot be the best."""
        layout = self.candidate.layout
        return not self.hard and 2 * layout.pipeline_size * self.candidate.num_microbatches <= FEW_OPERATIONS

    @property
    def label(self) -> str:
        """Of its layout."""
        return self.candidate.layout.label()


class Frontier:
    """The state of a search. First the best plan is proved; then the next best, as far as they are asked for."""

    def __init__(
        self,
        model: Model,
        candidates: list[Candidate],
        bounds_us: list[float],
        verdicts: list[Verdict],
        num_alternatives: int,
        say: Callable[[str], None],
    ) -> None:
        self.found: dict[str, Found] = {}
        self.verdicts = verdicts
        self.without_plan: list[Candidate] = []
        """Layouts in which nothing fits, or nothing was found."""
        self.open_bounds_us: dict[str, float] = {}
        """Layouts that time or effort left open."""
        self._simple: dict[str, Found] = {}
        self._queue = [
            Open(not _is_chain(model, candidate), bound, order, candidate)
            for order, (candidate, bound) in enumerate(zip(candidates, bounds_us, strict=True))
        ]
        heapq.heapify(self._queue)
        self._beaten: list[Open] = []
        self._say, self._num_alternatives, self._proving = say, num_alternatives, True

    @property
    def best_us(self) -> float:
        """Step time of the best plan known."""
        return min((found.step_us for found in (*self.found.values(), *self._simple.values())), default=inf)

    def first_group(self, seconds: float) -> list[tuple[Open, Task]]:
        """Simple splits of the most promising layouts: something to prune by."""
        items = heapq.nsmallest(max(GROUP, min(4 * GROUP, self._num_alternatives + 1)), self._queue)
        return [(item, Task(kind=SIMPLE, layout=item.candidate.layout, seconds=seconds)) for item in items]

    def next_group(self, seconds: float) -> list[tuple[Open, Task]]:
        """What to do next; empty when all is settled, or when ``seconds``, the time left, are over."""
        if seconds <= 0:
            self._stop()
        group: list[tuple[Open, Task]] = []
        threshold = self._threshold()
        while len(group) < GROUP:
            if not self._queue:
                if group or not self._proving:
                    break
                # The best plan is proved. Those it beat may be the next best.
                self._proving, self._queue, self._beaten = False, self._beaten, []
                heapq.heapify(self._queue)
                threshold = self._threshold()
                continue
            item = heapq.heappop(self._queue)
            if self._proving and item.bound_us >= threshold:
                self._beaten.append(item)
            elif item.bound_us >= threshold or not (self._proving or item.is_quick):
                self._bounded(item)
            else:
                group.append(
                    (
                        item,
                        Task(
                            kind=SOLVE,
                            layout=item.candidate.layout,
                            seconds=seconds,
                            effort=EFFORT,
                            cutoff_us=threshold if threshold < inf else None,
                            only_faster=True,
                        ),
                    )
                )
        return group

    def _threshold(self) -> float:
        return self.best_us * (1 - EXACT) if self._proving else self._threshold_of_alternatives()

    def _threshold_of_alternatives(self) -> float:
        steps = sorted(found.step_us for found in {**self._simple, **self.found}.values())
        return steps[self._num_alternatives] * (1 - EXACT) if len(steps) > self._num_alternatives else inf

    def progress(self) -> str:
        """One line for people who wait."""
        best = self.best_us
        known = f"best {best / 1000:.2f} ms" if best < inf else "no plan yet"
        least = min([item.bound_us for item in self._queue], default=best)
        return f"{len(self._queue)} layouts left, {known}, none below {min(best, least) / 1000:.2f} ms"

    def apply(self, item: Open, task: Task, outcome: Outcome) -> None:
        """Take note of what a task found out."""
        if task.kind == SIMPLE:
            if outcome.step_us is not None:
                self._simple[item.label] = Found(candidate=item.candidate, outcome=outcome)
        elif outcome.proved_infeasible:
            self._settle(item, "memory", "no split fits the memory, with any recomputation.")
            self.without_plan.append(item.candidate)
        else:
            self._solved(item, outcome)

    def _solved(self, item: Open, outcome: Outcome) -> None:
        before = self.best_us
        bound = max(item.bound_us, outcome.lower_bound_us)
        simple = self._simple.get(item.label)
        if outcome.step_us is None and simple is not None and not outcome.beaten:
            outcome = simple.outcome
        if outcome.step_us is None:
            if outcome.beaten and self._proving:
                self._beaten.append(replace(item, bound_us=bound))
            elif outcome.beaten:
                self._bounded(replace(item, bound_us=bound))
            else:
                self._left_open(item, bound)
                self.without_plan.append(item.candidate)
            return
        bound = min(outcome.step_us, bound)
        if outcome.step_us < before or not self.found:
            self._say(f"{item.label}: {outcome.step_us / 1000:.2f} ms, at least {bound / 1000:.2f} ms")
        self._keep(item, Found(candidate=item.candidate, outcome=replace(outcome, lower_bound_us=bound)))

    def _keep(self, item: Open, found: Found) -> None:
        bound = found.outcome.lower_bound_us
        self.found[item.label] = found
        self._settle(item, "solved", f"solved; bound {bound / 1000:.3f} ms.", bound_us=bound, step_us=found.step_us)

    def _left_open(self, item: Open, bound: float) -> None:
        self.open_bounds_us[item.label] = bound
        self._settle(item, "unsolved", "no plan was found, and none proved impossible, in time.", bound_us=bound)

    def _stop(self) -> None:
        """Time is up: what may still win stays open; a simple split is a plan, too."""
        best = self.best_us
        for label, simple in self._simple.items():
            if simple.step_us <= best and label not in self.found:
                bound = min([item.bound_us for item in self._queue if item.label == label], default=0.0)
                self.found[label] = replace(simple, outcome=replace(simple.outcome, lower_bound_us=bound))
        for item in self._queue:
            if item.label in self.found:
                self._settle(
                    item,
                    "solved",
                    "a simple split; the time limit came first.",
                    bound_us=item.bound_us,
                    step_us=self.found[item.label].step_us,
                )
            elif item.bound_us < best * (1 - EXACT):
                self._left_open(item, item.bound_us)
            else:
                self._bounded(item)
        for item in self._beaten:
            self._bounded(item)
        self._queue, self._beaten = [], []

    def _bounded(self, item: Open) -> None:
        simple = self._simple.get(item.label)
        if simple is not None and simple.step_us * (1 - EXACT) ** 2 <= item.bound_us:
            # Nothing in this layout is faster than its simple split.
            self._keep(
                item,
                Found(
                    candidate=item.candidate,
                    outcome=replace(simple.outcome, lower_bound_us=min(item.bound_us, simple.step_us)),
                ),
            )
            return
        best = self.best_us
        self._settle(
            item,
            "bounded",
            f"at least {item.bound_us / 1000:.2f} ms; the best plan takes {best / 1000:.2f} ms.",
            bound_us=item.bound_us,
        )

    def _settle(
        self, item: Open, outcome: str, reason: str, *, bound_us: float | None = None, step_us: float | None = None
    ) -> None:
        self.verdicts.append(
            Verdict(
                layout=item.candidate.layout,
                outcome=outcome,
                reason=reason,
                lower_bound_us=bound_us,
                step_us=step_us,
            )
        )


def _is_chain(model: Model, candidate: Candidate) -> bool:
    """Chains with one chunk per stage are solved faster than relaxed."""
    before: dict[str, set[str]] = {}
    for module in model.modules:
        read = set(module.predecessors).union(*(before[name] for name in module.predecessors))
        if len(read) < len(before):
            return False
        before[module.name] = read
    return candidate.layout.virtual_size == 1
