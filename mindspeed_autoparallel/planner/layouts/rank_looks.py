"""The first look of a search at all layouts that may hold the best plan: their bounds by ranks alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from mindspeed_autoparallel.planner.best_first import Open
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.tasks import RANKS, Task
from mindspeed_autoparallel.planner.layouts.workers import Workers

_TOGETHER = 32
"""Layouts bounded between two looks at the clock."""


def bound_by_ranks(
    workers: Workers, items: Sequence[Open[Candidate]], cutoff_us: float, deadline: float
) -> list[Open[Candidate]]:
    """Return ``items`` with higher bounds, smallest first, where they are below ``cutoff_us``; infinite where no split
    fits. Ends at ``deadline`` (of ``time.monotonic``)."""
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
