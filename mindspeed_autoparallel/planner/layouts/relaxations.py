"""Gains of the best layout if a limit is relaxed: solved again, not estimated."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.layout_search import EFFORT, FIRST_EFFORT
from mindspeed_autoparallel.planner.layouts.tasks import IMPROVE, SOLVE, Task
from mindspeed_autoparallel.planner.layouts.virtual_layouts import takes_long
from mindspeed_autoparallel.planner.layouts.workers import Workers
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.schedule import group_sizes
from mindspeed_autoparallel.spec import Layout
from mindspeed_autoparallel.spec.plan_records import Relaxation
from mindspeed_autoparallel.units import GIB


def relaxations_of(
    best: Candidate, placement: ModulePlacement, step_us: float, *, time_limit_s: float, workers: Workers
) -> tuple[Relaxation, ...]:
    """Return the gains in the best plan's layout of one GiB more per device, and of twice the microbatches (per
    sample)."""
    # With virtual stages only a plan is required, no proof.
    long = takes_long(best)
    plain = Task(
        kind=IMPROVE if long else SOLVE,
        layout=best.layout,
        seconds=time_limit_s / 2,
        effort=FIRST_EFFORT if long else EFFORT / 2,
        placement=placement,
    )
    doubled = replace(plain, layout=_with_legal_groups(best.layout, 2 * best.num_microbatches), batches=2)
    changes = ("one more GiB per device", 1.0), ("twice the microbatches", 0.5)
    outcomes = workers.perform([replace(plain, memory_limit_bytes=best.limit_bytes + GIB), doubled])
    found = []
    for (change, share), outcome in zip(changes, outcomes, strict=True):
        new_us = outcome.step_us
        if new_us is None:
            found.append(Relaxation(change=change, step_us=None, gain_fraction=None))
            continue
        if share == 1.0:
            # The known plan fits more memory, too.
            new_us = min(new_us, step_us)
        gain = 1 - share * new_us / step_us if step_us else 0.0
        found.append(Relaxation(change=change, step_us=new_us, gain_fraction=max(0.0, gain)))
    return tuple(found)


def _with_legal_groups(layout: Layout, num_microbatches: int) -> Layout:
    """Return an interleaved layout, with the smallest group size if its own is illegal for ``num_microbatches``."""
    if layout.schedule != "interleaved":
        return layout
    legal = group_sizes(layout.pipeline_size, num_microbatches)
    own = layout.microbatch_group_size or layout.pipeline_size
    return layout if own in legal else replace(layout, microbatch_group_size=legal[0])
