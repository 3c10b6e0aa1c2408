"""Neighbours of the best layouts that a search found: other group sizes of the interleaved schedule, three chunks.

Every layout is searched with the smallest group first, which holds the fewest microbatches in flight. Others are
searched if the order alone makes a known plan nearly as fast or faster. Three chunks on every rank would add a third
more layouts to bound, so they are tried in the best pipelines only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.space import with_smallest_groups
from mindspeed_autoparallel.planner.layouts.tasks import TIME, SolvedLayout, Task
from mindspeed_autoparallel.planner.layouts.workers import Workers
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.split.group_sizes import sizes_to_try
from mindspeed_autoparallel.spec import Layout

BEST_LAYOUTS, MOST_CANDIDATES = 3, 6
HOPEFUL = 0.02
"""Share of the best step: plans that remain slower by more with the new order are not searched further."""


def regrouped(workers: Workers, found: Sequence[tuple[Candidate, ModulePlacement]]) -> list[SolvedLayout]:
    """Return other group sizes of the best interleaved layouts of ``found`` (fastest first), the most promising
    first."""
    interleaved = [item for item in found if item[0].layout.schedule == "interleaved"][:BEST_LAYOUTS]
    if not interleaved:
        return []
    others = [
        (replace(candidate, layout=replace(candidate.layout, microbatch_group_size=size)), placement)
        for candidate, placement in interleaved
        for size in sizes_to_try(candidate.layout.pipeline_size, candidate.num_microbatches)
        if size != (candidate.layout.microbatch_group_size or candidate.layout.pipeline_size)
    ]
    known = [found[0], *interleaved]
    outcomes = workers.perform(
        [
            Task(kind=TIME, layout=candidate.layout, seconds=0.0, placement=placement)
            for candidate, placement in (*known, *others)
        ]
    )
    best_us = min(outcome.step_us or inf for outcome in outcomes[: len(known)])
    every = [
        (outcome.step_us or inf, SolvedLayout(candidate=candidate, outcome=outcome))
        for (candidate, _), outcome in zip(others, outcomes[len(known) :], strict=True)
    ]
    every.sort(key=lambda item: (item[0], item[1].candidate.layout.label()))
    return [item for step_us, item in every if step_us <= best_us * (1 + HOPEFUL)][:MOST_CANDIDATES]


def three_chunks(found: Sequence[tuple[Layout, float]], global_batch_size: int) -> list[Layout]:
    """Return the best pipelines of ``found`` (layout and step, fastest first) with three chunks on every rank."""
    tried: list[Layout] = []
    for layout, step_us in found:
        if step_us <= found[0][1] * (1 + HOPEFUL) and layout.pipeline_size > 1 and layout.schedule != "gpipe":
            other = replace(layout, virtual_size=3, schedule="interleaved", microbatch_group_size=0)
            other = with_smallest_groups(other, global_batch_size)
            if other not in tried:
                tried.append(other)
    return tried[:BEST_LAYOUTS]
