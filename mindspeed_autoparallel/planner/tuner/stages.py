"""Costs of cutting a model into pipeline stages in addition to links and blocks, fitted to short pipelines.

Three parts are separated. Passes: a stage's forward and backward take longer than its blocks, because each stage reads
its data, enters and leaves the model, and starts with cold caches. Messages: the measured passes, ordered by the
simulator, end earlier than the measured schedule. End of the step: ranks with different parameters agree on norms and
on whether to update.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mindspeed_autoparallel.profiles import layer_block
from mindspeed_autoparallel.profiles.calibration_records import PipelineResult, RankTimes
from mindspeed_autoparallel.profiles.device import StageOverhead
from mindspeed_autoparallel.profiles.records import DIRECTIONS, PointResult
from mindspeed_autoparallel.schedule import Program, StepTimes, make_program, simulate

_MOST_MESSAGE_US = 1e6
_NUM_HALVINGS = 40


@dataclass(frozen=True, kw_only=True)
class PipelineCost:
    """Additional times of a layout with more than one stage, in microseconds."""

    message_us: float = 0.0
    """Added to every message."""
    interleaved_message_us: float | None = None
    """Added to every message of the interleaved schedule; ``None`` if none was run."""
    stage: StageOverhead = field(default_factory=StageOverhead)
    step_us: float = 0.0
    """Added to every step."""


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """Modelled times of a pipeline's parts, in microseconds."""

    stages_us: Sequence[float]
    """By virtual stage: forward and backward of its blocks."""
    message_us: float
    """A message over the link."""
    optimizer_us_per_byte: float
    step: StepCost
    sends: str
    """One of ``schedule.SENDS``."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    passes_us: Sequence[float]
    """By virtual stage, the measured time of its two passes above the modelled one."""
    message_us: float
    step_us: float
    interleaved: bool


def fit_stages(samples: Sequence[tuple[PipelineResult, Modelled]]) -> PipelineCost | None:
    """Return the median of ``samples``; ``None`` without any."""
    found = [_found(sample, modelled) for sample, modelled in samples]
    if not found:
        return None
    inner = [value for item in found for value in item.passes_us[1:-1]]
    first, last = (_middle([item.passes_us[place] for item in found]) for place in (0, -1))
    messages = [[item.message_us for item in found if item.interleaved is chunks] for chunks in (False, True)]
    plain, interleaved = (_middle(values) if values else None for values in messages)
    return PipelineCost(
        message_us=interleaved or 0.0 if plain is None else plain,
        interleaved_message_us=interleaved,
        step_us=_middle([item.step_us for item in found]),
        stage=StageOverhead(first_us=first, inner_us=_middle(inner) if inner else last, last_us=last),
    )


def _middle(values: Sequence[float]) -> float:
    return max(0.0, statistics.median(values))


def _found(sample: PipelineResult, modelled: Modelled) -> _Found:
    stages, ranks = sample.stages, _of_one_pipeline(sample)
    chunks, kind = stages.virtual_size, "interleaved" if stages.interleaved else "1f1b"
    program = make_program(kind, len(ranks), stages.num_microbatches, chunks)
    forward, backward = (_by_stage(ranks, program, chunks, kind) for kind in ("F", "B"))
    passes_us = [
        statistics.fmean(one) + statistics.fmean(other) - blocks_us - modelled.step.per_microbatch_us
        for one, other, blocks_us in zip(forward, backward, modelled.stages_us, strict=True)
    ]

    def simulated_us(message_us: float) -> float:
        links = [modelled.message_us + message_us] * (len(forward) - 1)
        times = StepTimes(forward=forward, backward=backward, link=links)
        return simulate(program, times, sends=modelled.sends).step_time

    return _Found(
        passes_us=passes_us,
        message_us=_least(simulated_us, ranks[0].schedule_us),
        step_us=_end_us(sample, ranks) - _modelled_end_us(ranks, modelled),
        interleaved=stages.interleaved,
    )


def _of_one_pipeline(sample: PipelineResult) -> list[RankTimes]:
    """Return one rank per stage; replicas and tensor ranks do the same work."""
    ranks = {rank.stage: rank for rank in reversed(sample.ranks)}
    return [ranks[stage] for stage in sorted(ranks)]


def _by_stage(ranks: Sequence[RankTimes], program: Program, num_chunks: int, kind: str) -> list[list[float]]:
    """Return the times of a rank's forwards or backwards by virtual stage and microbatch."""
    found: list[dict[int, float]] = [{} for _ in range(len(ranks) * num_chunks)]
    for stage, (rank, actions) in enumerate(zip(ranks, program, strict=True)):
        times = rank.forward_us if kind == "F" else rank.backward_us
        ran = [action for action in actions if action.kind == kind]
        for action, time_us in zip(ran, times, strict=True):
            found[action.chunk * len(ranks) + stage][action.microbatch] = time_us
    return [[times[microbatch] for microbatch in sorted(times)] for times in found]


def _least(simulated_us: Callable[[float], float], measured_us: float) -> float:
    """Return the least message time, at least 0, with which the simulation takes as long as the measurement."""
    low, high = 0.0, _MOST_MESSAGE_US
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if simulated_us(middle) < measured_us else (low, middle)
    return low


def _end_us(sample: PipelineResult, ranks: Sequence[RankTimes]) -> float:
    """Return the rest of the step on the first stage, which starts and ends the schedule."""
    reduction_us = ranks[0].finalize_us if sample.data_size > 1 else 0.0  # S1 includes it
    return ranks[0].step_us - ranks[0].schedule_us - reduction_us


def _modelled_end_us(ranks: Sequence[RankTimes], modelled: Modelled) -> float:
    most = max(rank.updated_bytes for rank in ranks)
    return modelled.step.per_step_us + modelled.optimizer_us_per_byte * most


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Host time for schedule, data, clearing gradients, statistics and learning rate."""

    per_microbatch_us: float = 0.0
    per_step_us: float = 0.0


def fit_steps(results: Sequence[PointResult]) -> StepCost | None:
    """Return the median of ``results`` (measurements of layouts), or ``None`` if no whole step was measured.

    A step of ``n`` microbatches takes ``n (blocks + per_microbatch) + finalize + optimizer + per_step``; steps of two
    lengths determine both.
    """
    found = [_cost(result) for result in results if result.steps.num_microbatches]
    if not found:
        return None
    return StepCost(
        per_microbatch_us=statistics.median(cost.per_microbatch_us for cost in found),
        per_step_us=statistics.median(cost.per_step_us for cost in found),
    )


def _cost(result: PointResult) -> StepCost:
    steps, optimizer = result.steps, result.optimizer
    microbatch_us = max(0.0, (steps.many_us - steps.one_us) / (steps.num_microbatches - 1))
    rest_us = steps.one_us - microbatch_us - optimizer.finalize_us - optimizer.step_us
    return StepCost(per_microbatch_us=max(0.0, microbatch_us - _blocks_us(result)), per_step_us=max(0.0, rest_us))


def _blocks_us(result: PointResult) -> float:
    return float(
        sum(
            costs.time_us(direction) * numbers.get(block, 1)
            for module in result.modules
            for numbers in [Counter(map(layer_block, module.kinds))]
            for block, costs in module.blocks.items()
            for direction in DIRECTIONS
        )
    )
