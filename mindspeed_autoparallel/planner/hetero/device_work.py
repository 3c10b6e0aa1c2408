"""Memory mode window: a lower bound of each device's compute, for any split of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.schedule.window import MacroBatchTimes, Tick


@dataclass(frozen=True, kw_only=True)
class PipelineWork:
    """A backbone's pipeline before it is split."""

    num_stages: int
    num_chunks: int
    num_microbatches: int
    work_us: float
    """Time of one microbatch on all stages together."""
    layers: Sequence[tuple[int, float]] = ()
    """By module: its number of layers, and the time of the shortest for one microbatch."""


def own_work_at_least_us(
    pipeline: PipelineWork, ticks: Sequence[Tick], encoders: Sequence[Sequence[MacroBatchTimes]]
) -> float:
    """Return a lower bound of every split's step: a device computes its stage and its share of the encoders one after
    the other.

    Let t_s be stage s's time for a microbatch and e_s its share of the encoders, transfers included: T >= M t_s + e_s.
    Without virtual stages the first microbatch passes the stages before s, and the last microbatch returns through
    them: T >= M t_s + t_0 + ... + t_(s-1) + what stage 0 encodes first and differentiates last + what of e_s stage s
    does between its first forward and its last backward. The t_s add up to the work, and layers are whole.
    """
    least_us = _least_us(pipeline, [share_us(stage, encoders) for stage in range(pipeline.num_stages)], 0)
    if pipeline.num_chunks == 1:
        outside_us = sum(
            batch.inputs_us + batch.forward_us[0] + batch.outputs_us
            for own in encoders
            for batch in own
            if batch.first == 0
        ) + sum(
            batch.gradients_us + batch.backward_us[0]
            for own in encoders
            for batch in own
            if batch.last > ticks[-1].last_done
        )
        inside_us = [_inside_us(stage, ticks, encoders) for stage in range(pipeline.num_stages)]
        least_us = max(least_us, outside_us + _least_us(pipeline, inside_us, 1))
    return least_us


def share_us(stage: int, encoders: Sequence[Sequence[MacroBatchTimes]]) -> float:
    """Return a stage's share of the encoders, transfers included."""
    return sum(
        batch.inputs_us + batch.forward_us[stage] + batch.outputs_us + batch.gradients_us + batch.backward_us[stage]
        for own in encoders
        for batch in own
    )


def _inside_us(stage: int, ticks: Sequence[Tick], encoders: Sequence[Sequence[MacroBatchTimes]]) -> float:
    """Return a stage's share of the encoders between its first forward and its last backward."""
    forward = {tick.microbatch: tick.forward for tick in ticks}
    total = 0.0
    for own in encoders:
        for batch in own:
            if forward[batch.first] > stage:
                total += batch.inputs_us + batch.forward_us[stage] + batch.outputs_us
            if any(tick.last_done >= batch.last for tick in ticks):
                # A stage's first forward precedes the first encoder backward of stage 0.
                total += batch.gradients_us + batch.backward_us[stage]
    return total


def _least_us(pipeline: PipelineWork, more_us: Sequence[float], passes: int) -> float:
    """Return the least T with T >= M t_s + ``passes`` * (t_0 + ... + t_(s-1)) + ``more_us``[s] for every stage s.

    Given T, each stage takes as much as it can, first stage first: if one takes less, the next ones gain at most as
    much. This also holds for whole layers.
    """
    count, work_us = pipeline.num_microbatches, pipeline.work_us
    high = max(more_us) + (count + 1) * work_us + 1.0

    def holds(most_us: float) -> bool:
        done_us = 0.0
        for more in more_us:
            done_us += max(0.0, most_us - more - passes * done_us) / count
        if done_us < work_us:
            return False
        for number, layer_us in pipeline.layers:
            if layer_us <= 0:
                continue
            held = 0
            for more in more_us:
                room = (most_us - more - passes * held * layer_us) / (count * layer_us)
                # Slightly more than what fits still gives a lower bound.
                held += int(min(number, max(0.0, room + 1e-9)))
            if held < number:
                return False
        return True

    low = max(more_us)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low
