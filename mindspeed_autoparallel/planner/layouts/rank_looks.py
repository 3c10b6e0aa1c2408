"""Bounds of many layouts: by ranks alone at first, and at the end higher ones for layouts that time left open."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from mindspeed_autoparallel.planner.best_first import Open
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.tasks import PATHS, PROVE, RANKS, SOLVE, Outcome, Task
from mindspeed_autoparallel.planner.layouts.workers import Workers

_TOGETHER, _AT_THE_END = 32, 2
"""Number of layouts bounded between two readings of the clock: at first, and at the end."""


def bound_by_ranks(
    workers: Workers, items: Sequence[Open[Candidate]], cutoff_us: float, deadline: float
) -> list[Open[Candidate]]:
    """Return the ``items`` with bounds below ``cutoff_us``, raised by ranks alone, smallest first.

    The bound is infinite if no split fits. Ends at ``deadline`` (of ``time.monotonic``).
    """
    found = list(items)
    below = sorted((item.bound_us, place) for place, item in enumerate(items) if item.bound_us < cutoff_us)
    for first in range(0, len(below), _TOGETHER):
        if time.monotonic() >= deadline:
            break
        places = [place for _, place in below[first : first + _TOGETHER]]
        seconds = deadline - time.monotonic()
        tasks = [Task(kind=RANKS, layout=items[place].item.layout, seconds=seconds) for place in places]
        for place, outcome in zip(places, workers.perform(tasks), strict=True):
            bound_us = inf if outcome.proved_infeasible else max(items[place].bound_us, outcome.lower_bound_us)
            found[place] = replace(items[place], bound_us=bound_us)
    return found


def raise_smallest(
    workers: Workers,
    items: Sequence[Open[Candidate]],
    best_us: float,
    deadline: float,
    offer: Callable[[Open[Candidate], Outcome], None],
) -> list[Open[Candidate]]:
    """Return ``items`` with bounds raised until ``deadline``, always those with the smallest bounds.

    These bound the whole search. With virtual stages bounds come from critical paths, then from whole layers. ``offer``
    is called with every plan found on the way.
    """
    looks = {item.order: [SOLVE] if item.item.layout.virtual_size == 1 else [PATHS, PROVE] for item in items}
    queue = [(item.bound_us, item.order, item) for item in items]
    heapq.heapify(queue)
    found: list[Open[Candidate]] = []
    while queue and queue[0][0] < best_us and time.monotonic() < deadline:
        group = [heapq.heappop(queue)[2] for _ in range(min(_AT_THE_END, len(queue)))]
        tasks = [
            Task(
                kind=looks[item.order].pop(0),
                layout=item.item.layout,
                seconds=deadline - time.monotonic(),
                cutoff_us=best_us,
                only_faster=True,
                bound_us=item.bound_us,
            )
            for item in group
        ]
        for item, outcome in zip(group, workers.perform(tasks), strict=True):
            bound_us = best_us if outcome.beaten else max(item.bound_us, outcome.lower_bound_us)
            raised = replace(item, bound_us=inf if outcome.proved_infeasible else bound_us)
            if outcome.step_us is not None:
                offer(item, outcome)
            if looks[item.order]:
                heapq.heappush(queue, (bound_us, item.order, raised))
            else:
                found.append(raised)
    return [*found, *(item for _, _, item in queue)]
