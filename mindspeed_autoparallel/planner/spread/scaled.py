"""A profile scaled to other samples, block times and bytes times factors, and plans under it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.assembly import limits_of_plan, plan_of
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.spread.factors import SampleFactors
from mindspeed_autoparallel.profiles import Measurement, Profile, StateBytes
from mindspeed_autoparallel.spec import Plan

_LARGEST = 1.2
"""Ratio to the largest microbatch: slack for the bound of the memory."""


def mean_profile(profile: Profile, data: Distribution, factors: SampleFactors, share: float = 0.0) -> Profile:
    """Return ``profile`` at the mean microbatch of ``data``, for each micro batch size.

    Its bytes are interpolated by ``share`` between those of the mean microbatch (0) and 1.2 times those of the largest
    (1).
    """
    scales = {}
    names = [module.name for module in profile.model.modules]
    largest = _LARGEST * factors.largest(data)
    for size in sorted({measurement.at.micro_batch_size for measurement in profile.measurements}):
        times, sizes = factors.mean(data, size)
        sizes = sizes + share * (largest - sizes)
        scales[size] = (dict(zip(names, times.tolist(), strict=True)), dict(zip(names, sizes.tolist(), strict=True)))
    return scaled_profile(profile, scales)


def scaled_profile(profile: Profile, factors: dict[int, tuple[dict[str, float], dict[str, float]]]) -> Profile:
    """Return ``profile`` with times and bytes of every module scaled.

    ``factors``: by micro batch size, the factor of times and the factor of activations and messages, each by module
    name. Measurements of other micro batch sizes are left out. Model states stay unchanged.
    """
    kept = [
        _scaled(measurement, *factors[measurement.at.micro_batch_size])
        for measurement in profile.measurements
        if measurement.at.micro_batch_size in factors
    ]
    return replace(profile, measurements=tuple(kept), variable_data=None)


def planned_at(profile: Profile, plan: Plan) -> Plan:
    """Return ``plan``, of microbatches that are larger than the mean one, with the times and bytes of ``profile``."""
    found = evaluate(profile, plan.cluster, plan.layout, ModulePlacement.of_plan(plan), plan.global_batch_size)
    again = plan_of(profile, plan.cluster, plan.layout, found, plan.global_batch_size, plan.search)
    return replace(again, search=replace(plan.search, limits=limits_of_plan(found)))


def _scaled(measurement: Measurement, times: dict[str, float], sizes: dict[str, float]) -> Measurement:
    return replace(
        measurement,
        modules={name: _times(cost, times[name], sizes[name]) for name, cost in measurement.modules.items()},
        batch=_times(measurement.batch, 1.0, max(sizes.values())),
    )


def _times(value: Any, time: float, size: float) -> Any:
    """Return records with their times (``..._us``) and sizes (``..._bytes``) scaled, except model states."""
    if isinstance(value, dict):
        return {key: _times(one, time, size) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_times(one, time, size) for one in value)
    if not is_dataclass(value) or isinstance(value, type | StateBytes):
        return value
    changed = {}
    for item in fields(value):
        old = getattr(value, item.name)
        if item.name.endswith("_us"):
            changed[item.name] = old * time
        else:
            changed[item.name] = round(old * size) if item.name.endswith("_bytes") else _times(old, time, size)
    return replace(value, **changed)
