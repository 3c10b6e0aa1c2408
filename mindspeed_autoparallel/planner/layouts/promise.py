"""An estimate, not a bound, of the step time of a layout's best plan; it ranks layouts for a first look."""

from __future__ import annotations

from math import inf

from mindspeed_autoparallel.cost.memory import PlacedBlock, static_terms
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.layouts.bounds import expected_us, tail_bound_us
from mindspeed_autoparallel.profiles import BlockCost, Profile, RecomputeCost
from mindspeed_autoparallel.spec import Cluster

_LATER_RANKS = 0.6
"""Share of the first rank's recompute in a balanced split: later ranks hold fewer microbatches."""


def promise_us(profile: Profile, cluster: Cluster, candidate: Candidate) -> float:
    """Return an estimated step time in microseconds, infinite if the first rank of an even split never fits.

    It is the sum of the pipeline, the recompute that this rank needs, gradient reduction and optimizer.
    """
    layout, limit = candidate.layout, cluster.memory_limit_bytes or profile.device.memory_capacity_bytes
    size, count = layout.pipeline_size, candidate.num_microbatches
    in_flight: float = min(size, count)
    if layout.virtual_size > 1:
        in_flight = min(count, size + (size - 1) / layout.virtual_size)
    static = kept = least = again_us = 0.0
    highest = 0
    for module in profile.model.modules:
        cost = candidate.measurement.modules[module.name]
        for layer, number in cost.runs(0, module.num_layers):
            plain, whole = layer.recompute["none"], _least_kept(layer)
            static += number * _static(layer, candidate) / size
            kept += number * plain.saved_bytes * in_flight / size
            least += number * whole.saved_bytes * in_flight / size
            again_us += number * whole.extra_backward_us * count / size
            highest = max(highest, plain.backward_peak_bytes)
        ends = [_static(block, candidate) for block in (cost.pre, cost.post) if block is not None]
        static += sum(ends) if size == 1 else max(ends, default=0)
    left = limit - profile.overhead_bytes(candidate.measurement) - static - highest
    if least > left:
        return inf
    share = min(1.0, max(0.0, (kept - left) / (kept - least))) if kept > least else 0.0
    recompute_us = again_us * share * (1.0 if size == 1 else _LATER_RANKS)
    return expected_us(profile, candidate) + recompute_us + tail_bound_us(profile, cluster, candidate)


def _least_kept(layer: BlockCost) -> RecomputeCost:
    return min(layer.recompute.values(), key=lambda cost: cost.saved_bytes)


def _static(block: BlockCost, candidate: Candidate) -> int:
    return sum(static_terms([PlacedBlock(name="", cost=block)], candidate.layout).values())
