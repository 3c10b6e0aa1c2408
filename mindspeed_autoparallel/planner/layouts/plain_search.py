"""Search of the best plain recipe (``plain``) of all layouts: what a careful user finds without a search of splits."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from math import inf

from mindspeed_autoparallel.planner.best_first import Open
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.plain import is_plain
from mindspeed_autoparallel.planner.layouts.tasks import PLAIN, SolvedLayout, Task
from mindspeed_autoparallel.planner.layouts.turns import promise_us
from mindspeed_autoparallel.planner.layouts.workers import Workers
from mindspeed_autoparallel.spec.plan_records import Baseline

GROUP = 4
"""Layouts tried with one cutoff, so that the result does not depend on the number of processes."""
SHARE = 0.15
"""Largest share of the time limit."""


class PlainSearch:
    """The best known plain recipe, and the progress of its search."""

    def __init__(self, workers: Workers, found: Callable[[SolvedLayout], None]) -> None:
        self._workers, self._found = workers, found
        self.best: SolvedLayout | None = None
        self.num_left = 0
        """Number of layouts not tried in time."""

    def run(self, items: Sequence[Open[Candidate]], deadline: float) -> None:
        """Try plain recipes of ``items``, the most promising first.

        Stops when no bound is below the best recipe, or at ``deadline`` (of ``time.monotonic``).
        """
        queue = [(promise_us(item.item), item.order, item) for item in items if is_plain(item.item)]
        heapq.heapify(queue)
        while queue and time.monotonic() < deadline:
            cutoff_us = self.best.step_us if self.best is not None else inf
            group: list[Candidate] = []
            while queue and len(group) < GROUP:
                item = heapq.heappop(queue)[2]
                if item.bound_us < cutoff_us:
                    group.append(item.item)
            seconds = deadline - time.monotonic()
            limit = cutoff_us if cutoff_us < inf else None
            tasks = [Task(kind=PLAIN, layout=item.layout, seconds=seconds, cutoff_us=limit) for item in group]
            outcomes = self._workers.perform(tasks, enough=self.best is not None)
            for candidate, outcome in zip(group, outcomes, strict=True):
                self.num_left += outcome.timed_out
                if outcome.step_us is not None and (self.best is None or outcome.step_us < self.best.step_us):
                    self.best = SolvedLayout(candidate=candidate, outcome=outcome)
                    self._found(self.best)
        best_us = self.best.step_us if self.best is not None else inf
        self.num_left += sum(item.bound_us < best_us for _, _, item in queue)

    def baseline(self) -> tuple[Baseline, ...]:
        """Return the recipe as a plan's baseline; empty if none was found."""
        if self.best is None or self.best.outcome.placement is None:
            return ()
        placement = self.best.outcome.placement
        return (
            Baseline(
                name="plain",
                step_us=self.best.step_us,
                feasible=True,
                layers=dict(placement.layers),
                recompute={name: placement.recomputed(name) for name in placement.layers},
                note=f"{self.num_left} layouts were not tried in time" if self.num_left else "",
                layout=self.best.candidate.layout,
            ),
        )
