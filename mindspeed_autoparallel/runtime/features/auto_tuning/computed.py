"""``--auto-tuning --profile-source analytic``: traced calls get the catalogue's prices; nothing is launched."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_autoparallel.cost.analytic.operators import operator_us
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.planner.tuner.candidates import Family
from mindspeed_autoparallel.planner.tuner.host import HostModel
from mindspeed_autoparallel.planner.tuner.links import TIERS, catalogue_tier
from mindspeed_autoparallel.planner.tuner.pricing import Prices, calls_of
from mindspeed_autoparallel.planner.tuner.stages import PipelineCost
from mindspeed_autoparallel.planner.tuner.steps import StepCost
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.device import LinkTier
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase, Operator
from mindspeed_autoparallel.profiles.knowledge.estimate import Coverage, Estimate
from mindspeed_autoparallel.runtime.features.auto_tuning.calibration import Calibration
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.trace_store import Traces

_LOGGER = logging.getLogger(__name__)
_STACK = "megatron-core"
_CALLS_OF_A_LAYER = 60
"""Of one forward pass, over which the catalogue's launch time of a layer is spread."""


class Computed(Calibration):
    """Stands where a calibration stands, for a device nobody has at hand."""

    def __init__(
        self,
        request: TuningRequest,
        traces: Traces,
        found: dict[MeasuredAt, dict[str, Any]],
        target: Device,
        base: KnowledgeBase,
    ) -> None:
        self.request, self.traces, self.base, self.target = request, traces, base, target
        self.found = {point: result for point, result in found.items() if result["status"] == "ok"}
        self.failed = [point for point, result in found.items() if result["status"] != "ok"]
        self.device_name, self.device_key, self.software_key = target.name, target.name, _STACK
        self.efficiency = target.efficiency(_STACK)
        self.notes = [
            f"analytic: nothing was measured; all times are computed for {target.name} from datasheet and efficiencies "
            f"({self.efficiency.provenance})"
        ]

    def take(self, launches: Launches) -> Coverage:
        """Nothing is known by measurement, and nothing is measured."""
        _LOGGER.info(self.notes[0])
        variants = [
            variant
            for result in self.found.values()
            for variant in result["variants"].values()
            if variant["status"] == "ok"
        ]
        return Coverage(covered_time_share=0.0, missing=tuple(calls_of(variants)))

    def measured(self) -> dict[MeasuredAt, dict[str, Any]]:
        """No point."""
        return {}

    def prices(self) -> Prices:
        """Prices by formula."""
        host = HostModel(
            per_call_us=self.efficiency.launch_us / _CALLS_OF_A_LAYER,
            asynchronous=True,
            relative_error=self.efficiency.relative_error,
        )
        return ComputedPrices(
            base=self.base,
            device=self.device_key,
            software=self.software_key,
            tiers=self.tiers(),
            devices_per_node=self.request.devices_per_node,
            host=host,
            target=self.target,
        )

    def step_cost(self) -> StepCost:
        """The catalogue's fixed time of a step."""
        return StepCost(per_step_us=self.efficiency.step_us)

    def pipeline_cost(self) -> PipelineCost:
        """Nothing that a catalogue would know."""
        return PipelineCost()

    def tiers(self) -> dict[str, LinkTier]:
        """Of the catalogue."""
        return {tier: catalogue_tier(self.target, tier, self.request.devices_per_node) for tier in TIERS}

    def optimizer_us_per_byte(self) -> float:
        """Of parameters that a rank updates: about 30 bytes are moved for the two bytes of one."""
        return 15.0 / (self.target.memory_bandwidth_gb_per_s * 1e3 * self.efficiency.optimizer_fraction)


@dataclass
class ComputedPrices(Prices):
    """Every operator has a price."""

    target: Device | None = None

    def operator(self, operator: Operator) -> Estimate | None:
        """By formula, with the device's own error."""
        assert self.target is not None
        if operator not in self._known:
            efficiency = self.target.efficiency(_STACK)
            self._known[operator] = Estimate(
                time_us=operator_us(self.target, efficiency, operator),
                relative_error=efficiency.relative_error,
                exact=False,
            )
        return self._known[operator]


def marked(families: list[Family]) -> list[Family]:
    """``families`` whose profiles say that they are computed."""
    return [
        replace(
            family,
            profile=replace(family.profile, provenance=replace(family.profile.provenance, source="analytic")),
        )
        for family in families
    ]
