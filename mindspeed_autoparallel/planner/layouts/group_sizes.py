"""Other group sizes of the interleaved schedule, for the best layouts that a search found with the smallest.

Every layout is searched with the smallest group first, which holds the fewest microbatches in flight. Others are worth
their time where a plan known becomes nearly as fast or faster by the order alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.tasks import Outcome, Request
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.split.group_sizes import sizes_to_try

BEST_LAYOUTS, MOST_CANDIDATES = 3, 6
HOPEFUL = 0.02
"""Of the best step: slower plans by the order alone are not searched further."""


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """A layout with another group size, and what the plan known of it takes."""

    candidate: Candidate
    outcome: Outcome
    fits: bool


def regrouped(request: Request, found: Sequence[tuple[Candidate, ModulePlacement]]) -> list[Regrouped]:
    """Return other group sizes of the best interleaved layouts of ``found`` (fastest first), the likeliest first."""
    interleaved = [item for item in found if item[0].layout.schedule == "interleaved"][:BEST_LAYOUTS]
    if not interleaved:
        return []
    best_us = 0.0
    every: list[tuple[float, Regrouped]] = []
    for candidate, placement in [*found[:1], *interleaved]:
        step_us = _timed(request, candidate, placement)[0]
        best_us = min(best_us, step_us) if best_us else step_us
    for candidate, placement in interleaved:
        layout = candidate.layout
        known = layout.microbatch_group_size or layout.pipeline_size
        for size in sizes_to_try(layout.pipeline_size, candidate.num_microbatches):
            if size == known:
                continue
            other = replace(candidate, layout=replace(layout, microbatch_group_size=size))
            step_us, fits = _timed(request, other, placement)
            outcome = Outcome(placement=placement, step_us=step_us)
            every.append((step_us, Regrouped(candidate=other, outcome=outcome, fits=fits)))
    every.sort(key=lambda item: (item[0], item[1].candidate.layout.label()))
    return [item for step_us, item in every if step_us <= best_us * (1 + HOPEFUL)][:MOST_CANDIDATES]


def _timed(request: Request, candidate: Candidate, placement: ModulePlacement) -> tuple[float, bool]:
    found = evaluate(
        request.profile,
        request.cluster,
        candidate.layout,
        placement,
        request.global_batch_size,
        with_timeline=False,
    )
    return found.step.total_us, found.fits
