"""Stage two: profiles of the traced model, one per family of configurations."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.profiles import DeviceCost, MeasuredAt, Measurement, RecomputeCost
from mindspeed_autoparallel.runtime.host.sends import interleaved_sends
from mindspeed_autoparallel.runtime.search.profile_building import build_profile
from mindspeed_autoparallel.runtime.tuning.calibration import Calibration
from mindspeed_autoparallel.runtime.tuning.dimensions import SearchPlan
from mindspeed_autoparallel.runtime.tuning.traces import PLAIN, SELECTIVE, variant_name
from mindspeed_autoparallel.tuning.traced.candidates import Family
from mindspeed_autoparallel.tuning.traced.pricing import Prices

_RESERVE_FRACTION = 0.06
"""Of the device's memory: contexts, communicator buffers, fragmentation."""


def families(
    calibration: Calibration, plan: SearchPlan, arguments: argparse.Namespace, capacity_bytes: int
) -> tuple[list[Family], Prices]:
    """A family per way to run the layers, with the costs of every point that was traced or measured."""
    prices = calibration.prices()
    found = []
    for way in plan.ways:
        name = way.title
        results = _results(calibration, prices, name)
        if not results:
            reasons = {str(result["reason"]).splitlines()[-1] for result in _failures(calibration, name)}
            plan.left_out[name or "the script's own configuration"] = "; ".join(sorted(reasons)) or "not traced"
            continue
        cost = _device_cost(calibration, prices, results, capacity_bytes)
        profile = build_profile(
            calibration.request.description, results, cost,
            sequence_length=calibration.request.sequence_length,
            vocab_size=int(getattr(arguments, "padded_vocab_size", None) or arguments.vocab_size or 0),
            device_name=calibration.device_name, software={"software": calibration.software_key},
            interleaved_sends=interleaved_sends(arguments),
        )  # fmt: skip
        measurements = tuple(
            _with_selective(measurement, _variant(calibration, measurement.at, name, SELECTIVE), prices)
            for measurement in profile.measurements
        )
        found.append(Family(name=name, settings=way.settings, profile=replace(profile, measurements=measurements)))
    if not found:
        raise ProfileError(
            "no layout could be traced or measured:\n"
            + "\n".join(f"  {point.label()}: {result.get('reason')}" for point, result in calibration.found.items())
        )
    return found, prices


def _variant(calibration: Calibration, point: MeasuredAt, family: str, kind: str) -> dict[str, Any] | None:
    result = calibration.found.get(point)
    variant: dict[str, Any] | None = result["variants"].get(variant_name(family, kind)) if result else None
    return variant if variant is not None and variant["status"] == "ok" else None


def _failures(calibration: Calibration, family: str) -> list[dict[str, Any]]:
    name = variant_name(family, PLAIN)
    variants = [result["variants"].get(name, {}) for result in calibration.found.values()]
    return [variant for variant in variants if "reason" in variant]


def _results(calibration: Calibration, prices: Prices, family: str) -> dict[MeasuredAt, dict[str, Any]]:
    results: dict[MeasuredAt, dict[str, Any]] = {}
    for point in calibration.found:
        trace = _variant(calibration, point, family, PLAIN)
        if trace is not None:
            results[point] = {**prices.timed(trace), "relative_times": {}}
    if not family:
        results |= calibration.measured()
    return results


def _device_cost(
    calibration: Calibration, prices: Prices, results: Mapping[MeasuredAt, dict[str, Any]], capacity_bytes: int
) -> DeviceCost:
    step = calibration.step_cost()
    return DeviceCost(
        memory_capacity_bytes=int(capacity_bytes * (1 - _RESERVE_FRACTION)),
        runtime_overhead_bytes=min(int(result["host_bytes"]) for result in results.values()),
        intra=prices.tiers["intra"],
        inter=prices.tiers["inter"],
        optimizer_step_us_per_byte=calibration.optimizer_us_per_byte(),
        optimizer_step_fixed_us=step.per_step_us,
        # A microbatch passes every stage forward and backward.
        operation_overhead_us=step.per_microbatch_us / 2,
    )


def _with_selective(measurement: Measurement, trace: dict[str, Any] | None, prices: Prices) -> Measurement:
    """``measurement`` with the recompute kind ``selective`` as it was traced."""
    if trace is None:
        return measurement
    modules = dict(measurement.modules)
    for item in prices.timed(trace)["modules"]:
        module = modules[item["name"]]
        block, layer = item["blocks"]["layer"], module.layer
        selective = RecomputeCost(
            saved_bytes=round(block["saved_bytes"]),
            extra_backward_us=max(0.0, block["backward_us"] - layer.backward_us),
            forward_peak_bytes=round(block["forward_peak_bytes"]),
            backward_peak_bytes=round(block["backward_peak_bytes"]),
        )
        recompute = {**layer.recompute, "selective": selective}
        modules[item["name"]] = replace(module, layer=replace(layer, recompute=recompute))
    return replace(measurement, modules=modules)
