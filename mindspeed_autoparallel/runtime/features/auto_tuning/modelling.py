"""Stage two: profiles of the traced model, one per family of configurations."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.planner.tuner.candidates import Family
from mindspeed_autoparallel.planner.tuner.pricing import Prices
from mindspeed_autoparallel.profiles import BlockCost, DeviceCost, MeasuredAt, Measurement, ModuleCost, RecomputeCost
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.profile_building import build_profile
from mindspeed_autoparallel.runtime.features.auto_tuning.calibration import Calibration
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions import SearchPlan
from mindspeed_autoparallel.runtime.features.auto_tuning.trace_store import PLAIN, variant_name
from mindspeed_autoparallel.runtime.megatron.sends import interleaved_sends
from mindspeed_autoparallel.spec.recompute import policy_of

_RESERVE_FRACTION = 0.06
"""Of the device's memory: contexts, communicator buffers, fragmentation."""


def usable_bytes(capacity_bytes: int) -> int:
    """What a training may take of a device."""
    return int(capacity_bytes * (1 - _RESERVE_FRACTION))


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
            calibration.request.description,
            results,
            cost,
            sequence_length=calibration.request.sequence_length,
            vocab_size=int(getattr(arguments, "padded_vocab_size", None) or arguments.vocab_size or 0),
            device_name=calibration.device_name,
            software={"software": calibration.software_key},
            interleaved_sends=interleaved_sends(arguments),
        )
        measurements = tuple(
            _with_recompute(measurement, _kinds(calibration, measurement.at, name, plan), prices)
            for measurement in profile.measurements
        )
        found.append(Family(name=name, settings=way.settings, profile=replace(profile, measurements=measurements)))
    _name_useless(calibration, plan)
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
            results[point] = {**prices.timed(trace, point), "relative_times": {}}
    if not family:
        results |= calibration.measured()
    return results


def _device_cost(
    calibration: Calibration, prices: Prices, results: Mapping[MeasuredAt, dict[str, Any]], capacity_bytes: int
) -> DeviceCost:
    step, pipeline = calibration.step_cost(), calibration.pipeline_cost()
    return DeviceCost(
        memory_capacity_bytes=usable_bytes(capacity_bytes),
        runtime_overhead_bytes=min(int(result["host_bytes"]) for result in results.values()),
        intra=prices.tiers["intra"],
        inter=prices.tiers["inter"],
        optimizer_step_us_per_byte=calibration.optimizer_us_per_byte(),
        optimizer_step_fixed_us=step.per_step_us,
        # A microbatch passes every stage forward and backward.
        operation_overhead_us=step.per_microbatch_us / 2,
        message_overhead_us=pipeline.message_us,
        interleaved_message_overhead_us=pipeline.interleaved_message_us,
        stage_overhead=pipeline.stage,
        pipeline_step_us=pipeline.step_us,
    )


def _kinds(calibration: Calibration, point: MeasuredAt, family: str, plan: SearchPlan) -> dict[str, dict[str, Any]]:
    """Traces of the recompute kinds at a point."""
    found = {kind: _variant(calibration, point, family, kind) for kind in plan.recompute}
    return {kind: trace for kind, trace in found.items() if trace is not None}


def _with_recompute(measurement: Measurement, traces: Mapping[str, dict[str, Any]], prices: Prices) -> Measurement:
    """``measurement`` with the recompute kinds as they were traced."""
    modules = dict(measurement.modules)
    for kind, trace in traces.items():
        for item in prices.timed(trace, measurement.at)["modules"]:
            module = modules[item["name"]]
            modules[item["name"]] = module.with_layers(functools.partial(_with_kind, kind, item["blocks"]))
    return replace(measurement, modules={name: _useful(module) for name, module in modules.items()})


def _with_kind(kind: str, traced: Mapping[str, Any], block: str, layer: BlockCost) -> BlockCost:
    return replace(layer, recompute={**layer.recompute, kind: _recompute_cost(traced[block], layer)})


def _recompute_cost(block: Mapping[str, Any], plain: BlockCost) -> RecomputeCost:
    more_us = block["forward_us"] + block["backward_us"] - plain.forward_us - plain.backward_us
    return RecomputeCost(
        saved_bytes=round(block["saved_bytes"]),
        extra_backward_us=max(0.0, more_us),
        forward_peak_bytes=round(block["forward_peak_bytes"]),
        backward_peak_bytes=round(block["backward_peak_bytes"]),
    )


def _useful(module: ModuleCost) -> ModuleCost:
    """Without selective kinds that keep as much as none, or are nowhere better than one that adds no more time."""
    recompute = module.layer.recompute
    light = [kind for kind in recompute if policy_of(kind).kind == "selective"]
    light.sort(key=lambda kind: (recompute[kind].extra_backward_us, recompute[kind].saved_bytes))
    kept = {kind: cost for kind, cost in recompute.items() if kind not in light}
    for kind in light:
        cost = recompute[kind]
        if cost.saved_bytes < kept["none"].saved_bytes and not any(
            _is_no_larger(kept[other], cost) for other in light if other in kept
        ):
            kept[kind] = cost
    return module.with_layers(
        lambda block, layer: replace(layer, recompute={kind: layer.recompute[kind] for kind in kept})
    )


def _is_no_larger(one: RecomputeCost, other: RecomputeCost) -> bool:
    sizes = [(cost.saved_bytes, cost.forward_peak_bytes, cost.backward_peak_bytes) for cost in (one, other)]
    return all(a <= b for a, b in zip(*sizes, strict=True))


def _name_useless(calibration: Calibration, plan: SearchPlan) -> None:
    """Kinds that Megatron refuses everywhere, or that keep no byte less."""
    for kind in plan.recompute:
        reasons, saves, traced = set(), False, False
        for result in calibration.found.values():
            for name, variant in result["variants"].items():
                way, _, named = name.partition("|")
                if named != kind or variant["status"] == "not_needed":
                    continue
                if variant["status"] != "ok":
                    reasons.add(str(variant["reason"]).splitlines()[-1])
                    continue
                plain = result["variants"][variant_name(way, PLAIN)]
                traced, saves = True, saves or _saved(variant) < _saved(plain)
        if traced and not saves:
            plan.left_out[f"recompute {policy_of(kind).words}"] = "keeps no byte less in any layout"
        elif reasons and not traced:
            plan.left_out[f"recompute {policy_of(kind).words}"] = "; ".join(sorted(reasons))


def _saved(trace: Mapping[str, Any]) -> float:
    return float(
        sum(
            block["saved_bytes"]
            for module in trace["modules"]
            for name, block in module["blocks"].items()
            if name not in ("pre", "post")
        )
    )
