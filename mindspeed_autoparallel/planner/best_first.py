"""Best-first search by lower bound: the one loop, proof and progress line of ``plan``, hetero planning and tuning.

A search supplies the open items (``Open``, each with a proved lower bound of its step time) and decides how to expand
them (``Search``). The loop takes the smallest bound first, so once that bound reaches the cutoff, so do all others.
"""

from __future__ import annotations

import heapq
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, TypeVar

from mindspeed_autoparallel.spec.plan_records import ROUNDING, Relaxation, SearchRecord, Verdict

EXACT = 1e-9
"""Relative difference below which two step times are the same."""
REPORT_EVERY_S = 2.0

Progress = Callable[[str], None]
"""Receives one line of text that shows progress."""
Item = TypeVar("Item")


class Status(str):
    """A progress line that holds until the next one: a terminal replaces it."""


def silent(text: str) -> None:
    """Drop a progress line."""


def labelled(progress: Progress, label: str) -> Progress:
    """Return ``progress`` with ``label`` in front of every line."""
    return lambda text: progress(type(text)(f"{label}{text}"))


@dataclass(order=True, frozen=True)
class Open(Generic[Item]):
    """An item that is not settled. ``order`` breaks ties, so that runs are reproducible."""

    late: float
    """Sorts before the bound: items with a smaller value come first."""
    bound_us: float
    """No plan that this item contains has a shorter step."""
    order: int
    item: Item = field(compare=False)


class Search(ABC, Generic[Item]):
    """Defines how the loop handles one kind of open item."""

    @property
    @abstractmethod
    def best_us(self) -> float:
        """Return the step time of the best plan known, ``inf`` without one."""

    def settled_bound_us(self) -> float:
        """Return a lower bound for the plans of the items left unproved; ``inf`` if all are proved."""
        return inf

    @abstractmethod
    def cutoff_us(self) -> float:
        """Return the bound above which items are not worth expanding; called once per group."""

    def admits(self, item: Open[Item], cutoff_us: float) -> bool:
        """Return whether to expand ``item``."""
        return item.bound_us < cutoff_us

    @abstractmethod
    def expand(self, group: Sequence[Open[Item]], cutoff_us: float) -> Iterable[Open[Item]]:
        """Settle or refine all of ``group``; return the items that replace it, with bounds at least as high."""

    @abstractmethod
    def discard(self, item: Open[Item]) -> None:
        """Record an item that was not admitted."""

    def next_round(self) -> list[Open[Item]]:
        """Return the items of the next round, such as discarded ones under another cutoff."""
        return []

    def stop(self, left: list[Open[Item]]) -> None:
        """Record all open items when time is up; only searches with a deadline need it."""
        raise NotImplementedError


def best_first(
    search: Search[Item],
    items: Iterable[Open[Item]],
    *,
    deadline: float = inf,
    group_size: int = 1,
    progress: Progress = silent,
) -> None:
    """Expand ``items`` smallest bound first until none is left or ``deadline`` (of ``time.monotonic``) has passed.

    Items are taken in groups of up to ``group_size`` against one cutoff, so that the result does not depend on how many
    processes share a group.
    """
    queue = list(items)
    heapq.heapify(queue)
    reported = time.monotonic()
    while True:
        if time.monotonic() >= deadline:
            search.stop(queue)
            return
        group = _next_group(search, queue, group_size)
        if group:
            for item in search.expand(*group):
                heapq.heappush(queue, item)
        else:
            queue = search.next_round()
            heapq.heapify(queue)
            if not queue:
                return
        if time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            progress(Status(_state_of(search, queue)))


def _next_group(
    search: Search[Item], queue: list[Open[Item]], group_size: int
) -> tuple[list[Open[Item]], float] | None:
    cutoff_us = search.cutoff_us()
    group: list[Open[Item]] = []
    while queue and len(group) < group_size:
        item = heapq.heappop(queue)
        if search.admits(item, cutoff_us):
            group.append(item)
        else:
            search.discard(item)
    return (group, cutoff_us) if group else None


def _state_of(search: Search[Item], queue: list[Open[Item]]) -> str:
    best_us = search.best_us
    known = f"best {best_us / 1000:.2f} ms" if best_us < inf else "no plan yet"
    least_us = min([item.bound_us for item in queue], default=best_us)
    bound_us = min(best_us, least_us, search.settled_bound_us())
    return f"{len(queue)} layouts left, {known}, none below {bound_us / 1000:.2f} ms"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How far a plan can be from the fastest plan of the search space, under the cost model."""

    step_us: float
    lower_bound_us: float
    """No plan of the search space is faster."""
    seconds: float

    @property
    def gap_fraction(self) -> float:
        """Return the largest share of the step time that a better plan could save."""
        return max(0.0, 1 - self.lower_bound_us / self.step_us) if self.step_us else 0.0

    @property
    def is_optimal(self) -> bool:
        """Return whether the gap is within rounding to nanoseconds."""
        return self.gap_fraction <= ROUNDING

    def of(self, step_us: float) -> Proof:
        """Return the proof for another plan of the same search."""
        return replace(self, step_us=step_us)

    def record(
        self,
        *,
        num_configurations: int,
        num_solved: int,
        verdicts: Sequence[Verdict] = (),
        relaxations: Sequence[Relaxation] = (),
        limits: Sequence[str] = (),
        unproved: str = "feasible",
    ) -> SearchRecord:
        """Return the record of the search for the plan file; ``unproved`` is the status of a plan with a gap.

        Unsolved layouts whose bound is no better than the plan count as bounded.
        """
        return SearchRecord(
            status="optimal" if self.is_optimal else unproved,
            lower_bound_us=self.lower_bound_us,
            gap_fraction=self.gap_fraction,
            num_configurations=num_configurations,
            num_solved=num_solved,
            seconds=self.seconds,
            verdicts=tuple(map(self._settled, verdicts)),
            relaxations=tuple(relaxations),
            limits=tuple(limits),
        )

    def _settled(self, verdict: Verdict) -> Verdict:
        bound_us = verdict.lower_bound_us
        if verdict.outcome != "unsolved" or bound_us is None or bound_us < self.step_us * (1 - ROUNDING):
            return verdict
        return replace(verdict, outcome="bounded", reason=bounded_reason(bound_us, self.step_us))


def bounded_reason(bound_us: float, best_us: float) -> str:
    """Return the reason of a layout that a plan of ``best_us`` beats."""
    return f"at least {bound_us / 1000:.2f} ms; the best plan takes {best_us / 1000:.2f} ms."
