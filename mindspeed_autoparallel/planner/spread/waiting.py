"""The layouts worth drawing: their steps for the mean sample times the factor of waiting for unequal samples.

The waiting factor is that of stages with equal work: it depends on replicas, stages and microbatches, not on a split.
It is an estimate that orders layouts and proves nothing.
"""

from __future__ import annotations

import math
import time

import numpy

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.rank_memory import point_of
from mindspeed_autoparallel.planner.spread.drawn_steps import StepsUnderData
from mindspeed_autoparallel.planner.spread.draws import Array
from mindspeed_autoparallel.planner.spread.factors import SampleFactors
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.profiles import BlockCost, Profile
from mindspeed_autoparallel.spec import Layout, Plan

_NUM_DRAWS = 16
_MAX_LAYOUTS = 64
"""Number of layouts with the smallest steps for the mean sample."""


def expected_steps(
    profile: Profile, best: Plan, data: Distribution, factors: SampleFactors, is_balanced: bool, until: float = math.inf
) -> tuple[list[tuple[float, Layout]], bool]:
    """Return the layouts with a step or a bound in ``best``, the plan for the mean sample, at most 64.

    Each has its expected mean step in microseconds; the smallest comes first. The flag tells whether all of them were
    estimated before ``until``, by ``time.monotonic``; those with the smallest steps for the mean sample come first.
    """
    known = [(verdict.step_us or verdict.lower_bound_us or 0.0, verdict.layout) for verdict in best.search.verdicts]
    known = [(step_us, layout) for step_us, layout in known if step_us and point_of(profile, layout) is not None]
    found, is_whole = [], True
    for step_us, layout in sorted(known, key=lambda item: (item[0], item[1].label()))[:_MAX_LAYOUTS]:
        if not (is_whole := time.monotonic() < until):
            break
        try:
            found.append((step_us * waiting(profile, best, layout, data, factors, is_balanced), layout))
        except ConfigError:
            continue  # steps of this layout are not modelled
    return sorted(found, key=lambda item: (item[0], item[1].label())), is_whole


def waiting(
    profile: Profile, best: Plan, layout: Layout, data: Distribution, factors: SampleFactors, is_balanced: bool
) -> float:
    """Return the ratio, at least 1, of the mean drawn step to the step of mean samples, for equal stages."""
    times = _equal_stages(profile, layout)
    under = StepsUnderData(profile, best, layout, times, factors, [0.0] * (layout.num_virtual_stages - 1))
    drawn = under.drawn(data, _NUM_DRAWS)
    at_mean = under.step_of_factors_us(factors.mean(data, layout.micro_batch_size)[0])
    return max(1.0, float((drawn.balanced if is_balanced else drawn.in_order).mean()) / at_mean)


def _equal_stages(profile: Profile, layout: Layout) -> Array:
    """Return ``[pass, virtual stage, module]`` in nanoseconds: every stage has the same part of every module."""
    measurement = point_of(profile, layout)
    assert measurement is not None  # the search has priced it
    totals: Array = numpy.zeros((2, len(profile.model.modules)))
    for index, module in enumerate(profile.model.modules):
        cost = measurement.modules[module.name]
        totals[:, index] = module.num_layers * _passes(cost.layer)
        for block in (cost.pre, cost.prediction, cost.post):
            totals[:, index] += _passes(block) if block is not None else 0.0
    number = layout.num_virtual_stages
    return numpy.repeat(totals[:, None, :], number, axis=1) / number


def _passes(block: BlockCost) -> Array:
    return NS_PER_US * numpy.array([block.forward_us, block.backward_us])
