"""``--auto-tuning --profile-source analytic``: traced calls get the catalogue's prices; nothing is launched."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.operators import operator_us
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.planner.tuner.host import HostModel
from mindspeed_autoparallel.planner.tuner.links import TIERS, catalogue_tier
from mindspeed_autoparallel.planner.tuner.pricing import Prices, calls_of
from mindspeed_autoparallel.planner.tuner.stages import PipelineCost
from mindspeed_autoparallel.planner.tuner.steps import StepCost
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase, Operator
from mindspeed_autoparallel.profiles.knowledge.estimate import Coverage, Estimate
from mindspeed_autoparallel.profiles.records import TraceResult
from mindspeed_autoparallel.runtime.features.auto_tuning.calibration_result import (
    CalibrationResult,
    datasheet_optimizer_us_per_byte,
)

_LOGGER = logging.getLogger(__name__)
_STACK = "megatron-core"
_CALLS_OF_A_LAYER = 60
"""Of one forward pass, over which the catalogue's launch time of a layer is spread."""


def computed_costs(
    found: Mapping[MeasuredAt, TraceResult], target: Device, base: KnowledgeBase, devices_per_node: int
) -> CalibrationResult:
    """Return costs for a device that is not at hand, by formula."""
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
    """Prices of a catalogue's device: every operator has one."""

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
