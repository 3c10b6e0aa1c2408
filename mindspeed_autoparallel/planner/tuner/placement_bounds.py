"""Lower bounds of a placement's step time and memory, without simulation."""

from __future__ import annotations

from mindspeed_autoparallel.cost.memory import state_bytes
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, beside_blocks_ns
from mindspeed_autoparallel.planner.tuner.candidates import Configuration
from mindspeed_autoparallel.profiles import ModuleCost
from mindspeed_autoparallel.spec.recompute import policy_of


def placement_bound_us(configuration: Configuration, layers: tuple[int, ...], kind: str, number: int) -> float:
    """Return a lower bound for every schedule: a rank waits for its first microbatch, works, and returns its last one.

    Rank r cannot start before stages 0 to r - 1 have passed on a microbatch, and the step cannot end before they have
    passed back a gradient; in between rank r runs all microbatches.
    """
    profile, layout = configuration.variant.profile, configuration.layout
    module = profile.model.modules[0].name
    cost = configuration.candidate.measurement.modules[module]
    whole = policy_of(kind).layers_per_group > 0
    profiled = "full" if whole else kind
    times = []
    start = 0
    for stage, (count, beside_ns) in enumerate(zip(layers, beside_blocks_ns(profile.device, layout), strict=True)):
        again = min(number, count) if whole else count
        time_us = sum(held * (layer.forward_us + layer.backward_us) for layer, held in cost.runs(start, count))
        time_us += sum(held * layer.recompute[profiled].extra_backward_us for layer, held in cost.runs(start, again))
        start += count
        for block, here in ((cost.pre, stage == 0), (cost.post, stage == len(layers) - 1)):
            if block is not None and here:
                time_us += block.forward_us + block.backward_us
        times.append(time_us + 2 * beside_ns / NS_PER_US)
    size, count = layout.pipeline_size, configuration.candidate.num_microbatches
    ahead, bound = 0.0, 0.0
    for rank in range(size):
        bound = max(bound, ahead + count * sum(times[rank::size]))
        ahead += times[rank]
    return bound


def may_fit(configuration: Configuration, layers: tuple[int, ...], kind: str, number: int) -> bool:
    """Return false if the first rank is proved too full by model states and the activations of its warm-up.

    Megatron's first rank has ``min(P, M)`` microbatches in flight; interleaved, ``min(M v, 2 (P - 1) + (v - 1) P + 1)``
    chunks, each counted as the smallest one.
    """
    profile, layout = configuration.variant.profile, configuration.layout
    module = profile.model.modules[0].name
    cost = configuration.candidate.measurement.modules[module]
    size, count = layout.pipeline_size, configuration.candidate.num_microbatches
    held = [(sum(layers[:stage]), layers[stage]) for stage in range(0, len(layers), size)]
    static = sum(equal * state_bytes(layer, layout) for stage in held for layer, equal in cost.runs(*stage))
    static += state_bytes(cost.pre, layout)
    saved = [_saved_bytes(cost, kind, number, *stage) - cost.layer.output_bytes for stage in held]
    chunks = min(count, size)
    if layout.virtual_size > 1:
        chunks = min(count * layout.virtual_size, 2 * (size - 1) + (layout.virtual_size - 1) * size + 1)
    return (
        static + chunks * max(0, min(saved)) + profile.device.runtime_overhead_bytes
        <= configuration.candidate.limit_bytes
    )


def _saved_bytes(cost: ModuleCost, kind: str, number: int, start: int, count: int) -> int:
    """Return the bytes saved by a stage of ``count`` layers, the first ``number`` recomputed if ``kind`` is
    ``full``."""
    size = policy_of(kind).layers_per_group
    if not size:
        return sum(equal * layer.recompute[kind].saved_bytes for layer, equal in cost.runs(start, count))
    again = min(number, count)
    plain = cost.runs(start + again, count - again)
    inputs = [layer.recompute["full"].saved_bytes for layer, _ in cost.runs(start, again)]
    groups = -(-again // size) * min(inputs, default=0)
    return groups + sum(equal * layer.recompute["none"].saved_bytes for layer, equal in plain)
