"""Costs for a search of combined 1F1B that no pair undercuts, so that bounds from them are valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindspeed_autoparallel.profiles import BlockCost, Measurement, ModuleCost, Profile
from mindspeed_autoparallel.spec import Layout
from mindspeed_autoparallel.spec.recompute import policy_of

_ROUNDING_US = 0.001
"""Subtracted in addition to the hidden time, because times are rounded to nanoseconds later."""


def searched_costs(profile: Profile, measurement: Measurement, layout: Layout) -> Measurement:
    """Return the costs that the solver uses.

    In a layout with paired microbatches every layer's time excludes all that its exchanges may hide behind any other
    layer, and a layer has only the recompute that Megatron accepts.

    ``evaluate`` prices pairs one by one, and passes that are alone in full.
    """
    if not layout.paired:
        return measurement
    share = profile.device.hidden_share
    return replace(measurement, modules={name: _hidden(cost, share) for name, cost in measurement.modules.items()})


def _hidden(cost: ModuleCost, share: float) -> ModuleCost:
    layers = cost.distinct_layers
    forward_us = max(layer.forward_us - layer.forward_exchange_us for layer in layers)
    backward_us = max(layer.backward_us - layer.backward_exchange_us for layer in layers)

    def less(time_us: float, exchange_us: float, computing_us: float) -> float:
        hidden_us = share * min(time_us, exchange_us, max(0.0, computing_us))
        return max(0.0, time_us - hidden_us - _ROUNDING_US)

    def faster(block: str, layer: BlockCost) -> BlockCost:
        return replace(
            without_whole_layers(layer),
            forward_us=less(layer.forward_us, layer.forward_exchange_us, backward_us),
            backward_us=less(layer.backward_us, layer.backward_exchange_us, forward_us),
        )

    return cost.with_layers(faster)


def without_whole_layers(cost: BlockCost) -> BlockCost:
    """Return ``cost`` without recomputation of whole layers or of experts, which Megatron refuses beside pairs."""
    kept = {
        kind: again
        for kind, again in cost.recompute.items()
        if policy_of(kind).kind != "full" and "moe" not in policy_of(kind).modules
    }
    return replace(cost, recompute=kept)


def have_exchanges(measurements: Sequence[Measurement]) -> bool:
    """Return whether any of them has the time of the experts' exchanges."""
    return any(
        layer.forward_exchange_us > 0
        for measurement in measurements
        for cost in measurement.modules.values()
        for layer in cost.distinct_layers
    )
