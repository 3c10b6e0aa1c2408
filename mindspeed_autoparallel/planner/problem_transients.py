"""Transients in the memory rows of a split problem: what surely stands on everything else, and what hides it."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.planner.placement import RECOMPUTED_KINDS, prediction_may_be_apart
from mindspeed_autoparallel.profiles import BlockCost, Measurement, Profile
from mindspeed_autoparallel.spec import Layout

KIND_ORDER = ("none", *RECOMPUTED_KINDS)


def surely_on_top(blocks: Sequence[BlockCost], names: list[str]) -> int:
    """Return what stands at least on everything else, whichever of ``blocks`` comes last, in whichever way, on
    everything; a post block behind it may hide it (``hidden_by_post``)."""
    costs = [block.recompute[name] for block in blocks for name in names]
    return min(max(cost.forward_peak_bytes, cost.backward_peak_bytes) for cost in costs)


def hidden_by_post(profile: Profile, layout: Layout, measurement: Measurement) -> int:
    """Return how much less the transients of layers may count on the last stage than elsewhere: what post block and
    prediction saved is freed before a layer's backward."""
    cost = measurement.modules[profile.model.modules[-1].name]
    return _hidden_by(profile, layout, measurement, [cost.prediction, cost.post]) if cost.post is not None else 0


def raised_limits(
    limits: tuple[int, ...], profile: Profile, layout: Layout, measurement: Measurement
) -> tuple[int, ...]:
    """Return ``limits`` by rank, higher by what hides transients of layers: on the last rank, and on the one before it
    where multi-token prediction may lie there."""
    if len(limits) == 1:
        return limits
    last = limits[-1] + hidden_by_post(profile, layout, measurement)
    return (*limits[:-2], limits[-2] + _hidden_by_prediction(profile, layout, measurement), last)


def _hidden_by_prediction(profile: Profile, layout: Layout, measurement: Measurement) -> int:
    """Return the same of the stage before the last, which may hold layers and multi-token prediction."""
    cost = measurement.modules[profile.model.modules[-1].name]
    if cost.prediction is None or not prediction_may_be_apart(profile.model, layout):
        return 0
    return _hidden_by(profile, layout, measurement, [cost.prediction])


def _hidden_by(profile: Profile, layout: Layout, measurement: Measurement, behind: Sequence[BlockCost | None]) -> int:
    """Return how much of layers' transients what the blocks ``behind`` them saved may hide."""
    if layout.virtual_size > 1:
        return 0
    module = profile.model.modules[-1]
    cost = measurement.modules[module.name]
    ways = [kind for kind in KIND_ORDER if kind in cost.layer.recompute]
    tops = [surely_on_top([layer], ways) for layer, _ in cost.runs(0, module.num_layers)]
    return min(sum(block.recompute["none"].saved_bytes for block in behind if block is not None), max(tops))
