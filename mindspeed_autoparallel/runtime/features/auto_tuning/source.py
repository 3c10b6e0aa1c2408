"""Stages one and two: traces of the script's model in every layout, and the profiles for the search."""

from __future__ import annotations

import argparse
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.cost.device import usable_bytes
from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.planner.tuner.candidates import ProfileVariant
from mindspeed_autoparallel.planner.tuner.pricing import Prices
from mindspeed_autoparallel.profiles import BlockCost, DeviceCost, MeasuredAt, Measurement, ModuleCost, RecomputeCost
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
from mindspeed_autoparallel.profiles.records import (
    PLAIN,
    BlockRecord,
    BlockTrace,
    ModelRecord,
    TraceResult,
    VariantName,
)
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.features.auto_tuning.calibration import Calibration
from mindspeed_autoparallel.runtime.features.auto_tuning.costs import CalibrationResult, computed_costs
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.planning import SearchPlan, plan_search
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.variants import SearchContext
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.switching import modelled_variants, target_of
from mindspeed_autoparallel.runtime.features.auto_tuning.traces import Traces, tell_untraced
from mindspeed_autoparallel.runtime.megatron.sends import interleaved_sends
from mindspeed_autoparallel.runtime.profiling.sources.analytic import kind_of
from mindspeed_autoparallel.runtime.profiling.sources.building import build_profile, provenance_of
from mindspeed_autoparallel.spec.recompute import policy_of


def profile_variants(
    request: TuningRequest,
    traces: Mapping[MeasuredAt, TraceResult],
    costs: CalibrationResult,
    plan: SearchPlan,
    arguments: argparse.Namespace,
    memory_bytes: int,
) -> tuple[list[ProfileVariant], dict[str, str]]:
    """Return the variants of the layers, with the costs of every point that was traced or measured.

    Also returns the variants and recompute kinds that are left out, with the reason.
    """
    found, left_out = [], {}
    provenance = provenance_of(request.description, costs.source, costs.device_name, {"software": costs.software})
    for way in plan.variants:
        results = _results(traces, costs, way.title)
        if not results:
            failures = [result.failures.get(VariantName(way.title, PLAIN)) for result in traces.values()]
            reasons = sorted({failure.summary for failure in failures if failure is not None})
            left_out[way.title or "the script's own configuration"] = "; ".join(reasons) or "not traced"
            continue
        device = _device_cost(costs, results, memory_bytes)
        profile = build_profile(request.description, results, device, arguments, provenance)
        measurements = tuple(
            _with_recompute(measurement, _recompute_traces(traces, measurement.at, way.title, plan), costs.prices)
            for measurement in profile.measurements
        )
        found.append(
            ProfileVariant(name=way.title, settings=way.settings, profile=replace(profile, measurements=measurements))
        )
    if not found:
        raise ProfileError(f"no layout could be traced or measured: {', '.join(point.label() for point in traces)}.")
    return found, {**left_out, **_useless_kinds(traces, plan)}


def _results(
    traces: Mapping[MeasuredAt, TraceResult], costs: CalibrationResult, way: str
) -> dict[MeasuredAt, ModelRecord]:
    name = VariantName(way, PLAIN)
    results: dict[MeasuredAt, ModelRecord] = {
        point: costs.prices.timed(result.variants[name], point)
        for point, result in traces.items()
        if name in result.variants
    }
    return results if way else {**results, **costs.measured}


def _device_cost(costs: CalibrationResult, results: Mapping[MeasuredAt, ModelRecord], memory_bytes: int) -> DeviceCost:
    step, pipeline = costs.step, costs.pipeline
    return DeviceCost(
        memory_capacity_bytes=memory_bytes,
        runtime_overhead_bytes=min(result.host_bytes for result in results.values()),
        intra=costs.prices.tiers["intra"],
        inter=costs.prices.tiers["inter"],
        optimizer_step_us_per_byte=costs.optimizer_us_per_byte,
        optimizer_step_fixed_us=step.per_step_us,
        # A microbatch passes every stage twice: forward and backward.
        operation_overhead_us=step.per_microbatch_us / 2,
        message_overhead_us=pipeline.message_us,
        interleaved_message_overhead_us=pipeline.interleaved_message_us,
        stage_overhead=pipeline.stage,
        pipeline_step_us=pipeline.step_us,
    )


def _recompute_traces(
    traces: Mapping[MeasuredAt, TraceResult], point: MeasuredAt, way: str, plan: SearchPlan
) -> dict[str, BlockTrace]:
    """Return the traces of the recompute kinds at a point."""
    variants = traces[point].variants if point in traces else {}
    names = {kind: VariantName(way, kind) for kind in plan.recompute}
    return {kind: variants[name] for kind, name in names.items() if name in variants}


def _with_recompute(measurement: Measurement, traces: Mapping[str, BlockTrace], prices: Prices) -> Measurement:
    """Return ``measurement`` with the traced recompute kinds."""
    modules = dict(measurement.modules)
    for kind, trace in traces.items():
        for item in prices.timed(trace, measurement.at).modules:
            changed = functools.partial(_with_kind, kind, item.blocks)
            modules[item.name] = modules[item.name].with_layers(changed)
    return replace(measurement, modules={name: _useful(module) for name, module in modules.items()})


def _with_kind(kind: str, traced: Mapping[str, BlockRecord], block: str, layer: BlockCost) -> BlockCost:
    return replace(layer, recompute={**layer.recompute, kind: _recompute_cost(traced[block], layer)})


def _recompute_cost(block: BlockRecord, plain: BlockCost) -> RecomputeCost:
    more_us = block.forward_us + block.backward_us - plain.forward_us - plain.backward_us
    return RecomputeCost(
        saved_bytes=round(block.saved_bytes),
        extra_backward_us=max(0.0, more_us),
        forward_peak_bytes=round(block.forward_peak_bytes),
        backward_peak_bytes=round(block.backward_peak_bytes),
    )


def _useful(module: ModuleCost) -> ModuleCost:
    """Drop selective kinds that save no memory, or that another kind with no more time and memory replaces."""
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


def _useless_kinds(traces: Mapping[MeasuredAt, TraceResult], plan: SearchPlan) -> dict[str, str]:
    """Return the recompute kinds that Megatron refuses everywhere, or that save no memory, with the reason."""
    left_out = {}
    for kind in plan.recompute:
        pairs = [
            (trace, result.variants[VariantName(name.variant, PLAIN)])
            for result in traces.values()
            for name, trace in result.variants.items()
            if name.recompute == kind
        ]
        reasons = {
            failure.summary
            for result in traces.values()
            for name, failure in result.failures.items()
            if name.recompute == kind
        }
        title = f"recompute {policy_of(kind).words}"
        if pairs and not any(_saved_bytes(trace) < _saved_bytes(plain) for trace, plain in pairs):
            left_out[title] = "saves no memory in any layout"
        elif reasons and not pairs:
            left_out[title] = "; ".join(sorted(reasons))
    return left_out


def _saved_bytes(trace: BlockTrace) -> float:
    return sum(
        block.saved_bytes
        for module in trace.modules
        for name, block in module.blocks.items()
        if name not in ("pre", "post")
    )


_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TunedProfiles:
    """Input of the search, and notes on its sources."""

    variants: tuple[ProfileVariant, ...]
    plan: SearchPlan
    costs: CalibrationResult
    searched: dict[str, str]
    """Dimension to its values, for display."""
    left_out: dict[str, str]
    """Dimension, or a value of it, to the reason."""
    notes: tuple[str, ...]


def what_to_search(request: TuningRequest, arguments: argparse.Namespace) -> SearchPlan:
    """Return what to trace and search; ``ConfigError`` if no layout is legal, before anything starts."""
    plan = plan_search(request, arguments, _device_kind(request))
    if not plan.points:
        raise ConfigError(
            f"no layout of {request.num_ranks} ranks is legal for this model: "
            + "; ".join(f"{name}: {reason}" for name, reason in plan.left_out.items())
        )
    return plan


def profile_source(
    request: TuningRequest, plan: SearchPlan, arguments: argparse.Namespace, launches: Launches
) -> TunedProfiles:
    """Trace, measure unknown operators (or compute them), and return a profile per variant of the layers."""
    device, target = current_device(), request.target_device
    base = KnowledgeBase(request.knowledge_file)
    _LOGGER.info(f"stage 1 of 3: trace and measure; work dir {request.work_dir}")
    memory_bytes = _memory_bytes(request, device)
    traces = Traces(request, plan, memory_bytes)
    found, left_out = traces.take(launches)
    if target is None:
        calibration = Calibration(request, traces, found, device, base, interleaved_sends(arguments))
        costs = calibration.take(launches)
    else:
        costs = computed_costs(found, target, base, request.devices_per_node)
    traced = {point: result for point, result in found.items() if result.failure is None}
    notes, impossible = _told_of_untraced(found, costs, launches.coordinator.log_dir)
    left_out |= impossible
    _LOGGER.info("stage 2 of 3: model")
    plain, useless = profile_variants(request, traced, costs, plan, arguments, memory_bytes)
    left_out |= useless
    context = SearchContext(request=request, arguments=arguments, device_name=_device_kind(request))
    switched, titles = modelled_variants(plain, context, traced, costs.prices, target_of(costs.device_name, target))
    return TunedProfiles(
        variants=(*plain, *switched),
        plan=plan,
        costs=costs,
        searched={**plan.searched, **({"modelled, not measured": ", ".join(titles)} if titles else {})},
        left_out={**plan.left_out, **left_out, **context.left_out},
        notes=(*costs.notes, *notes),
    )


def _told_of_untraced(
    found: Mapping[MeasuredAt, TraceResult], costs: CalibrationResult, log_dir: Path
) -> tuple[list[str], dict[str, str]]:
    """Return notes on layouts that were measured instead of traced, and reasons for those that are left out."""
    failed = [point for point, result in found.items() if result.failure is not None]
    notes, impossible = tell_untraced(failed, costs.measured, found)
    if impossible and len(failed) == len(found) and not costs.measured:
        reasons = "; ".join(f"{names} {reason}" for names, reason in impossible.items())
        raise ProfileError(f"no layout could be traced or measured: {reasons}. See {log_dir}.")
    return notes, impossible


def _device_kind(request: TuningRequest) -> str:
    """Return the kind of the training device: ``cpu``, ``cuda`` or ``npu``."""
    return current_device().name if request.target_device is None else kind_of(request.target_device)


def _memory_bytes(request: TuningRequest, device: Any) -> int:
    """Return the memory that a rank may use: the user's limit, or the device's memory minus a reserve."""
    if request.memory_limit_bytes is not None:
        return request.memory_limit_bytes
    if request.target_device is not None:
        return request.target_device.usable_bytes
    capacity = int(device.total_memory_bytes())
    shared = device.name == "cpu" and "LOCAL_WORLD_SIZE" not in os.environ
    return usable_bytes(capacity // request.num_processes_per_node if shared else capacity)
