"""Tie-break between equally fast plans: least recomputation, so that every run returns the same plan."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluate
from mindspeed_autoparallel.planner.placement import RECOMPUTED_KINDS, ModulePlacement
from mindspeed_autoparallel.planner.rank_memory import fits_rank
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout


def with_least_recompute(
    profile: Profile, cluster: Cluster, layout: Layout, placement: ModulePlacement, global_batch_size: int
) -> tuple[ModulePlacement, Evaluation]:
    """Return the same split, with no layer recomputed that its rank has memory to keep.

    Stages are processed in order, the most expensive kind first. A schedule is monotone in its stage times, so the step
    does not get longer, unless a reduction overlaps the backward: then the placement stays unchanged.
    """
    before = evaluate(profile, cluster, layout, placement, global_batch_size, with_timeline=False)
    num_microbatches = layout.num_microbatches(global_batch_size)
    best = placement
    for v in range(layout.num_virtual_stages):
        for module in profile.model.modules:
            for kind in RECOMPUTED_KINDS:
                kept, most = 0, best.recompute.get(module.name, {}).get(kind, (0,) * layout.num_virtual_stages)[v]
                # Bisection: the more layers are kept, the more memory is needed.
                while kept < most:
                    trial = -(-(kept + most) // 2)
                    candidate = _keeping(best, module.name, kind, v, trial)
                    if fits_rank(profile, cluster, layout, candidate, num_microbatches, v % layout.pipeline_size):
                        kept = trial
                    else:
                        most = trial - 1
                best = _keeping(best, module.name, kind, v, kept)
    if best == placement:
        return placement, before
    after = evaluate(profile, cluster, layout, best, global_batch_size, with_timeline=False)
    if after.fits and after.step.total_us <= before.step.total_us:
        return best, after
    return placement, before


def _keeping(placement: ModulePlacement, module: str, kind: str, stage: int, count: int) -> ModulePlacement:
    """Return the placement with ``count`` layers fewer recomputed as ``kind`` on a virtual stage."""
    if not count:
        return placement
    kinds = placement.recompute[module]
    row = tuple(number - count * (v == stage) for v, number in enumerate(kinds[kind]))
    return replace(placement, recompute={**placement.recompute, module: {**kinds, kind: row}})
