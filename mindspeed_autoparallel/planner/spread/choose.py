"""The best plans by means, judged by the distribution: the fastest of those that are safe enough.

The search finds the best layouts for the mean sample; only those (``top_k`` + 1) are drawn. A plan outside them may be
better for the spread: nothing is proved about it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.assembly import limits_of_plan, plan_of
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.rank_memory import point_of
from mindspeed_autoparallel.planner.spread.drawn_steps import NUM_DRAWS, DrawnSteps, PlanUnderData
from mindspeed_autoparallel.planner.spread.factors import SampleFactors, sample_factors
from mindspeed_autoparallel.planner.spread.memory import OutOfMemory, out_of_memory
from mindspeed_autoparallel.planner.spread.scaled import scaled_profile
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Layout, Plan
from mindspeed_autoparallel.spec.data import ConsideredPlan, DataRecord
from mindspeed_autoparallel.units import format_bytes

Array = Any
"""A numpy array."""
Search = Callable[[Profile, "list[Layout] | None"], Plan]
"""Searches a profile, over all layouts or only those given."""
_SEED = 20260602
_NUM_GROUPS = 4096
LEVELS = (None, 0.8, 0.95, 1.0, 1.2)
"""Quantiles of microbatches that must fit everywhere at once, tried one after another until a plan is safe; the last is
1.2 times the largest, because the bound of the memory has some slack."""
_SCOPE = "splits that hold larger microbatches than the mean one"


@dataclass(frozen=True, kw_only=True)
class SpreadOptions:
    """What is asked of a plan for data whose samples differ."""

    padding: str = "longest"
    is_balanced: bool = False
    max_oom_probability: float = 1e-3
    oom_steps: int = 10_000

    def __post_init__(self) -> None:
        if not 0 < self.max_oom_probability <= 1:
            raise ConfigError(f"--max-oom-probability must be above 0 and at most 1, got {self.max_oom_probability:g}.")
        if self.oom_steps < 1:
            raise ConfigError(f"--oom-steps must be at least 1, got {self.oom_steps}.")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A plan with its drawn steps and its chance to run out of memory."""

    plan: Plan
    drawn: DrawnSteps
    is_balanced: bool
    memory: OutOfMemory

    @property
    def mean_us(self) -> float:
        """Return the mean of the steps as training takes its samples."""
        return float(self._steps.mean())

    @property
    def mean_error_us(self) -> float:
        """Return a standard error of the mean that the draws' own is at most (Owen, Monte Carlo variance of scrambled
        net quadrature, 1997: a Latin hypercube of n draws is no worse than n - 1 independent ones)."""
        return float(self._steps.std() / (len(self._steps) - 1) ** 0.5)

    def quantile_us(self, share: float) -> float:
        """Return a quantile of these steps."""
        return float(numpy.quantile(self._steps, share))

    @property
    def _steps(self) -> Array:
        return self.drawn.balanced if self.is_balanced else self.drawn.in_order


def mean_profile(profile: Profile, data: Distribution, factors: SampleFactors, level: float | None = None) -> Profile:
    """Return ``profile`` at the mean microbatch of ``data``, at each micro batch size; with a ``level``, its bytes are
    those of that quantile of the microbatches, above 1 so many times the largest's."""
    scales = {}
    names = [module.name for module in profile.model.modules]
    generator = numpy.random.default_rng(_SEED)
    for size in sorted({measurement.at.micro_batch_size for measurement in profile.measurements}):
        times, sizes = factors.mean(data, size)
        if level is not None and level >= 1:
            sizes = level * factors.of(data.sizes()[:, None, :])[1].max(axis=0)
        elif level is not None:
            drawn = data.sizes()[generator.choice(len(data.rows), (_NUM_GROUPS, size), p=data.shares())]
            sizes = numpy.quantile(factors.of(drawn)[1], level, axis=0)
        scales[size] = (
            dict(zip(names, times.tolist(), strict=True)),
            dict(zip(names, sizes.tolist(), strict=True)),
        )
    return scaled_profile(profile, scales)


def choose_plan(profile: Profile, data: Distribution, options: SpreadOptions, search: Search) -> Plan:
    """Return the plan with the smallest mean step whose chance to run out of memory is small enough.

    Where none of the plans for the mean sample is safe, plans that fit larger microbatches are searched. Raises
    ``InfeasiblePlan`` where those are not safe either.
    """
    factors = sample_factors(profile, data, options.padding)
    judged: list[Judged] = []
    at_mean = mean_profile(profile, data, factors)
    for level in LEVELS:
        try:
            found = _plans(mean_profile(profile, data, factors, level), search)
        except InfeasiblePlan:
            if level is None:
                raise
            continue
        known = {plan_key(one.plan) for one in judged}
        new = [_at_mean(at_mean, plan) if level is not None else plan for plan in found if plan_key(plan) not in known]
        judged += [judge(profile, plan, data, factors, options) for plan in new]
        safe = [one for one in judged if is_safe(one, options)]
        if safe:
            best = min(safe, key=lambda one: (one.mean_us, one.plan.layout.label()))
            return with_record(profile, best, judged, data, factors, options)
    raise none_is_safe(judged, options, data)


def is_safe(judged: Judged, options: SpreadOptions) -> bool:
    """Return whether the bound on running out of memory is small enough."""
    return judged.memory.probability <= options.max_oom_probability


def none_is_safe(judged: Sequence[Judged], options: SpreadOptions, data: Distribution) -> InfeasiblePlan:
    """Return the error that says how near the nearest of ``judged`` is, names the longest sample, and what to do."""
    name = f" ({data.source.longest_record})" if data.source.longest_record else ""
    nearest = min(judged, key=lambda one: one.memory.probability)
    memory = nearest.memory
    return InfeasiblePlan(
        f"none of {len(judged)} plans is safe: a probability of at most {options.max_oom_probability:g} to run out of "
        f"memory within {options.oom_steps} steps. Nearest is {nearest.plan.layout.label()}: at most "
        f"{memory.probability:.2g}; the heaviest samples together need {format_bytes(memory.worst_bytes)} of "
        f"{format_bytes(memory.limit_bytes)} on pipeline rank {memory.pipeline_rank}. The longest "
        f"sample{name} has {int(data.column('tokens')[0][-1])} tokens. Lower --seq-length, raise the probability "
        "allowed, or use more devices."
    )


def _plans(profile: Profile, search: Search) -> list[Plan]:
    """Return the best plan, and that of each next best layout: their splits are searched again for the stages."""
    best = search(profile, None)
    return [best, *(search(profile, [other.layout]) for other in best.alternatives)]


def plan_key(plan: Plan) -> str:
    """Return what tells plans apart: layout, split and recompute."""
    return plan.layout.label() + repr([(stage.layers, stage.recompute) for stage in plan.stages])


def _at_mean(profile: Profile, plan: Plan) -> Plan:
    """Return ``plan`` with the times and bytes of ``profile``, that of the mean sample."""
    measurement, layout = point_of(profile, plan.layout), plan.layout
    assert measurement is not None  # it was planned
    found = evaluate(profile, plan.cluster, layout, ModulePlacement.of_plan(plan), plan.global_batch_size)
    again = plan_of(profile, plan.cluster, layout, measurement, found, plan.global_batch_size, plan.search)
    return replace(again, search=replace(plan.search, limits=limits_of_plan(found), scope=_SCOPE))


def judge(profile: Profile, plan: Plan, data: Distribution, factors: SampleFactors, options: SpreadOptions) -> Judged:
    """Draw steps of ``plan`` under ``profile`` (as measured) and bound its chance to run out of memory.

    Raises ``ConfigError`` for layouts whose steps are not drawn.
    """
    drawn = PlanUnderData(profile, plan, factors).drawn(data)
    memory = out_of_memory(profile, plan, data, factors, options.oom_steps)
    return Judged(plan=plan, drawn=drawn, is_balanced=options.is_balanced, memory=memory)


def with_record(
    profile: Profile,
    best: Judged,
    judged: Sequence[Judged],
    data: Distribution,
    factors: SampleFactors,
    options: SpreadOptions,
) -> Plan:
    """Return the plan of ``best`` with what it says about the data, beside all that were ``judged``."""
    plan = best.plan
    packed = PlanUnderData(profile, plan, sample_factors(profile, data, "none")).drawn(data)
    record = DataRecord(
        sha256=data.source.sha256,
        num_draws=NUM_DRAWS,
        padding=options.padding,
        is_balanced=options.is_balanced,
        by_means_us=plan.step.total_us,
        mean_us=best.mean_us,
        p50_us=best.quantile_us(0.5),
        p95_us=best.quantile_us(0.95),
        balanced_mean_us=float(best.drawn.balanced.mean()),
        packed_mean_us=float(packed.balanced.mean()),
        mean_error_us=best.mean_error_us,
        imbalance=best.drawn.imbalance,
        oom_probability=best.memory.probability,
        oom_steps=options.oom_steps,
        worst_bytes=best.memory.worst_bytes,
        worst_rank=best.memory.pipeline_rank,
        considered=tuple(
            ConsideredPlan(
                label=one.plan.layout.label(),
                by_means_us=one.plan.step.total_us,
                mean_us=one.mean_us,
                p95_us=one.quantile_us(0.95),
                oom_probability=one.memory.probability,
            )
            for one in sorted(judged, key=lambda one: one.mean_us)
        ),
        notes=factors.notes,
    )
    return replace(plan, data=record)
