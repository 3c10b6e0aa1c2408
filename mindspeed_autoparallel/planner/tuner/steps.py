"""Step time outside blocks, gradient reduction and optimizer, fitted to whole measured steps."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.profiles import layer_block
from mindspeed_autoparallel.profiles.records import DIRECTIONS, PointResult


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
