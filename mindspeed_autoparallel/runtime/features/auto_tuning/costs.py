"""Costs of the traced model: measured on devices, or computed for one of the catalogue."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.cost.analytic.operators import operator_us
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.device import Device, Efficiency
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.tuner.host import HostModel
from mindspeed_autoparallel.planner.tuner.links import TIERS, catalogue_tier
from mindspeed_autoparallel.planner.tuner.pricing import Prices, calls_of
from mindspeed_autoparallel.planner.tuner.stages import PipelineCost, StepCost
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.device import COLLECTIVES, LinkTier
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase, Operator
from mindspeed_autoparallel.profiles.knowledge.estimate import Coverage, Estimate
from mindspeed_autoparallel.profiles.records import PointResult, TraceResult
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.traces import num_written
from mindspeed_autoparallel.runtime.profiling.calibrate.results import read_operators
from mindspeed_autoparallel.runtime.profiling.measure.steps import Pipeline

_STATE_BYTES = 20
"""Estimated bytes per parameter with gradients, optimizer and copies, to leave out layouts that will not fit."""


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """Costs of the traced model, measured on devices or computed for one of the catalogue."""

    source: str
    """``measured`` or ``analytic``."""
    device_name: str
    software: str
    prices: Prices
    optimizer_us_per_byte: float
    """Optimizer time per byte of the parameters that a rank updates."""
    step: StepCost
    pipeline: PipelineCost
    coverage: Coverage
    measured: dict[MeasuredAt, PointResult]
    """Points that could not be traced and were measured instead."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Items for the launch to measure."""

    coverage: Coverage
    operators: tuple[Operator, ...]
    collectives: tuple[str, ...]
    points: tuple[MeasuredAt, ...]
    pipelines: tuple[Pipeline, ...]

    @property
    def nothing(self) -> bool:
        """Return whether no launch is needed."""
        return not (self.operators or self.collectives or self.points or self.pipelines)


def is_measurable(request: TuningRequest, point: MeasuredAt) -> bool:
    """Return whether the measuring devices can run ``point``, regardless of its memory."""
    world = request.num_measuring
    return (
        world % (point.tensor_size * point.context_size) == 0
        and world // point.tensor_size % point.expert_size == 0
        and point.tensor_size <= request.num_processes_per_node
    )


def needed_bytes(result: TraceResult) -> float:
    """Return the approximate device memory of a layout, to leave out those that will not fit."""
    blocks = [block for module in result.plain.modules for block in module.blocks.values()]
    state = _STATE_BYTES * sum(block.parameters.num_parameters for block in blocks)
    return 2 * (state + sum(block.saved_bytes + block.backward_peak_bytes for block in blocks))


def datasheet_optimizer_us_per_byte(device: Device, efficiency: Efficiency | None = None) -> float:
    """Return the optimizer's time per byte of parameters: it moves about 30 bytes for each 2-byte parameter.

    ``efficiency``: by default the first of the device.
    """
    efficiency = efficiency or next(iter(device.efficiencies.values()))
    return 15.0 / (device.memory_bandwidth_gb_per_s * 1e3 * efficiency.optimizer_fraction)


def collectives_to_sample(known: Mapping[str, LinkTier], request: TuningRequest) -> tuple[str, ...]:
    """Return all collectives if one is missing on a tier that the measuring devices have, else none."""
    sizes = (request.num_processes_per_node, request.num_nodes)
    wanted = [tier for tier, size in zip(TIERS, sizes, strict=True) if size > 1]
    sampled = all(tier in known and set(known[tier].operations) == set(COLLECTIVES) for tier in wanted)
    return () if sampled else tuple(COLLECTIVES)


def find_measured(name: str) -> Device:
    """Return the catalogue's entry of the measuring device, for values that were not sampled; ``ConfigError`` if there
    is none."""
    try:
        return find_device(name)
    except ConfigError as error:
        raise ConfigError(
            f"{error} It is needed for links that were not sampled: measure on two nodes with two devices each."
        ) from error


def tiers_or_catalogue(
    sampled: Mapping[str, LinkTier], request: TuningRequest, catalogue: Callable[[], Device]
) -> tuple[dict[str, LinkTier], list[str]]:
    """Return both tiers, sampled or from the catalogue, and notes about the latter."""
    found, notes = dict(sampled), []
    places = (("inside a node", "--nproc-per-node 2 or more"), ("between nodes", "--nnodes 2"))
    for tier, (where, how) in zip(TIERS, places, strict=True):
        if tier not in found:
            found[tier] = catalogue_tier(catalogue(), tier, request.devices_per_node)
            if tier == "intra" or request.num_ranks > request.devices_per_node:
                used = f"datasheet figures are used; {how} samples them"
                notes.append(f"links {where} were never sampled here: {used}")
    return found, notes


def measured_so_far(folder: Path, num_operators: int, layouts: list[Path]) -> Callable[[], str]:
    """Return a function that describes the progress of a measuring launch that starts now and writes into
    ``folder``."""
    started = time.time()

    def describe() -> str:
        measured = len(read_operators(folder, since=started).rows)
        return (
            f"measured {measured} of {num_operators} operators, {num_written(layouts, started)} of {len(layouts)} "
            "whole layouts"
        )

    return describe


_LOGGER = logging.getLogger(__name__)
_STACK = "megatron-core"
_CALLS_OF_A_LAYER = 60
"""Number of operators of one forward pass, over which the catalogue's launch time of a layer is spread."""


def computed_costs(
    found: Mapping[MeasuredAt, TraceResult], target: Device, base: KnowledgeBase, devices_per_node: int
) -> CalibrationResult:
    """Return costs for an absent device, by formula."""
    efficiency = target.efficiency(_STACK)
    note = (
        f"analytic: nothing was measured; all times are computed for {target.name} from datasheet and efficiencies "
        f"({efficiency.provenance})"
    )
    _LOGGER.info(note)
    host = HostModel(
        per_call_us=efficiency.launch_us / _CALLS_OF_A_LAYER,
        asynchronous=True,
        relative_error=efficiency.relative_error,
    )
    variants = [trace for result in found.values() for trace in result.variants.values()]
    return CalibrationResult(
        source="analytic",
        device_name=target.name,
        software=_STACK,
        prices=ComputedPrices(
            base=base,
            device=target.name,
            software=_STACK,
            tiers={tier: catalogue_tier(target, tier, devices_per_node) for tier in TIERS},
            devices_per_node=devices_per_node,
            host=host,
            target=target,
        ),
        optimizer_us_per_byte=datasheet_optimizer_us_per_byte(target, efficiency),
        step=StepCost(per_step_us=efficiency.step_us),
        pipeline=PipelineCost(),
        coverage=Coverage(covered_time_share=0.0, missing=tuple(calls_of(variants))),
        measured={},
        notes=(note,),
    )


@dataclass(kw_only=True)
class ComputedPrices(Prices):
    """Prices for a device of the catalogue, which cover every operator."""

    target: Device

    def operator(self, operator: Operator) -> Estimate | None:
        """Return the time by formula, with the device's own error."""
        if operator not in self._known:
            efficiency = self.target.efficiency(_STACK)
            self._known[operator] = Estimate(
                time_us=operator_us(self.target, efficiency, operator),
                relative_error=efficiency.relative_error,
                exact=False,
            )
        return self._known[operator]
