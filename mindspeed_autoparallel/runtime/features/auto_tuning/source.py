"""Stages one and two: the script's model traced in every layout, and profiles of it that the search reads."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.planner.tuner.candidates import ProfileVariant
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
from mindspeed_autoparallel.profiles.records import TraceResult
from mindspeed_autoparallel.runtime.devices import current_device
from mindspeed_autoparallel.runtime.features.auto_tuning.calibration import Calibration
from mindspeed_autoparallel.runtime.features.auto_tuning.calibration_result import CalibrationResult
from mindspeed_autoparallel.runtime.features.auto_tuning.computed import computed_costs
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions import SearchPlan, plan_search
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.context import SearchContext
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
from mindspeed_autoparallel.runtime.features.auto_tuning.modelling import profile_variants, usable_bytes
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.switching import modelled_variants, target_of
from mindspeed_autoparallel.runtime.features.auto_tuning.trace_failures import tell_untraced
from mindspeed_autoparallel.runtime.features.auto_tuning.trace_store import Traces
from mindspeed_autoparallel.runtime.megatron.sends import interleaved_sends
from mindspeed_autoparallel.runtime.profiling.sources.analytic import kind_of

_LOGGER = logging.getLogger(__name__)
_RESERVED_SHARE = 0.94
"""What ``usable_bytes`` leaves of a device: a limit that the user gives has the reserve taken off already."""


@dataclass(frozen=True, kw_only=True)
class TunedProfiles:
    """Everything the search reads, and notes on its sources."""

    variants: tuple[ProfileVariant, ...]
    plan: SearchPlan
    costs: CalibrationResult
    searched: dict[str, str]
    """Dimension to its values, for people."""
    left_out: dict[str, str]
    """Dimension, or a value of it, to the reason."""
    notes: tuple[str, ...]


def what_to_search(request: TuningRequest, arguments: argparse.Namespace) -> SearchPlan:
    """Return what is to be traced and searched; ``ConfigError`` where nothing is legal, before anything starts."""
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
    """Trace, measure what is unknown (or compute it), and return a profile per way to run the layers."""
    device, target = current_device(), request.target_device
    base = KnowledgeBase(request.knowledge_file)
    _LOGGER.info(f"stage 1 of 3: profile small; work dir {request.work_dir}")
    capacity_bytes = _capacity_bytes(request, device)
    traces = Traces(request, plan, usable_bytes(capacity_bytes))
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
    plain, useless = profile_variants(request, traced, costs, plan, arguments, capacity_bytes)
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
    """Return notes on layouts that were measured in place of a trace, and reasons for those that are left out."""
    failed = [point for point, result in found.items() if result.failure is not None]
    notes, impossible = tell_untraced(failed, costs.measured, found)
    if impossible and len(failed) == len(found) and not costs.measured:
        reasons = "; ".join(f"{names} {reason}" for names, reason in impossible.items())
        raise ProfileError(f"no layout could be traced or measured: {reasons}. See {log_dir}.")
    return notes, impossible


def _device_kind(request: TuningRequest) -> str:
    """Return ``cpu``, ``cuda`` or ``npu``: what will train."""
    return current_device().name if request.target_device is None else kind_of(request.target_device)


def _capacity_bytes(request: TuningRequest, device: Any) -> int:
    if request.memory_limit_bytes is not None:
        return int(request.memory_limit_bytes / _RESERVED_SHARE) + 1
    if request.target_device is not None:
        return int(request.target_device.memory_gib * 2**30)
    capacity = int(device.total_memory_bytes())
    shared = device.name == "cpu" and "LOCAL_WORLD_SIZE" not in os.environ
    return capacity // request.num_processes_per_node if shared else capacity
