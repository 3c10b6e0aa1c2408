"""Choice of a plan by the distribution of samples: the fastest one whose probability of running out of memory is low.

The search finds the best layouts for the mean sample, and bounds or steps of all others. Steps are drawn for the
layouts with the smallest expected steps. Another plan may be better for the distribution: no proof covers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy

from mindspeed_autoparallel.data.balance import as_loaded, balance, in_order
from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.assembly import limits_of_plan, plan_of
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.spread.drawn_steps import NUM_DRAWS, DrawnSteps, PlanUnderData, StepsUnderData
from mindspeed_autoparallel.planner.spread.draws import Array
from mindspeed_autoparallel.planner.spread.factors import SampleFactors, sample_factors
from mindspeed_autoparallel.planner.spread.memory import Arrangement, OutOfMemory, out_of_memory
from mindspeed_autoparallel.planner.spread.scaled import mean_profile
from mindspeed_autoparallel.planner.spread.waiting import expected_steps
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Layout, Plan
from mindspeed_autoparallel.spec.plan_records import ConsideredPlan, DataRecord
from mindspeed_autoparallel.units import format_bytes

Search = Callable[[Profile, "list[Layout] | None"], Plan]
"""Searches a profile, over all layouts or only the given ones."""
MAX_LAYOUTS = 12
"""Number of layouts drawn once a safe plan is known, at most."""
_HOPELESS = 1.25
"""Ratio to the best safe step above which layouts are not drawn."""
_NUM_HALVINGS = 5
_MAX_CONSIDERED = 12
_SCOPE = "splits that hold larger microbatches than the mean one"


@dataclass(frozen=True, kw_only=True)
class SpreadOptions:
    """Requirements on a plan for data with samples of unequal size."""

    padding: str = "longest"
    is_balanced: bool = False
    is_ordered: bool = False
    """Whether microbatches of a replica are reordered by length (``--order-microbatches``)."""
    max_oom_probability: float = 1e-3
    oom_steps: int = 10_000
    pack_length: int = 0
    """Tokens to which packs are filled; 0: packs have as many samples as a microbatch."""
    is_exchanged: bool = True
    """Whether ``is_balanced`` may give whole loaded microbatches to other replicas; otherwise it forms new ones."""

    @property
    def arrangement(self) -> Arrangement:
        """Return how training may rearrange samples into microbatches."""
        return "batch" if self.is_balanced else "replica" if self.is_ordered else "none"

    def __post_init__(self) -> None:
        if not 0 < self.max_oom_probability <= 1:
            raise ConfigError(f"--max-oom-probability must be above 0 and at most 1, got {self.max_oom_probability:g}.")
        if self.oom_steps < 1:
            raise ConfigError(f"--oom-steps must be at least 1, got {self.oom_steps}.")
        if self.pack_length < 0 or (self.pack_length and not (self.is_balanced and self.padding == "none")):
            raise ConfigError(
                f"--data-pack-length must be at least 1 and needs --data-padding none, which packs texts, and "
                f"--data-balance, which forms the packs; got {self.pack_length}."
            )


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A plan with its drawn steps and its probability of running out of memory."""

    plan: Plan
    drawn: DrawnSteps
    is_balanced: bool
    memory: OutOfMemory

    @property
    def mean_us(self) -> float:
        """Return the mean drawn step under the training's arrangement of samples, in microseconds."""
        return float(self._steps.mean())

    @property
    def mean_error_us(self) -> float:
        """Return an upper bound of the standard error: n of these draws are as good as n - 1 others (Owen 1997)."""
        return float(self._steps.std() / (len(self._steps) - 1) ** 0.5)

    def quantile_us(self, share: float) -> float:
        """Return a quantile of these steps, in microseconds."""
        return float(numpy.quantile(self._steps, share))

    @property
    def _steps(self) -> Array:
        return self.drawn.balanced if self.is_balanced else self.drawn.in_order


def choose_plan(profile: Profile, data: Distribution, options: SpreadOptions, search: Search) -> Plan:
    """Return the plan with the smallest mean step among those with a small enough probability of running out of memory.

    Steps are drawn for the best plans for the mean sample, then for the layouts with the smallest expected steps; those
    without a safe plan get splits that hold larger microbatches. Raises ``InfeasiblePlan`` if no plan is safe.
    """
    factors = sample_factors(profile, data, options.padding, options.pack_length)
    at_mean = mean_profile(profile, data, factors)
    best = search(at_mean, None)
    layouts = [best.layout, *(other.layout for other in best.alternatives)]
    expected = expected_steps(profile, best, data, factors, options.is_balanced)
    ordered = [(0.0, layout) for layout in layouts] + [item for item in expected if item[1] not in layouts]
    judged: list[Judged] = []
    fastest: Judged | None = None
    not_drawn: ConfigError | None = None
    for number, (expected_us, layout) in enumerate(ordered):
        if fastest is not None and (number >= MAX_LAYOUTS or expected_us > _HOPELESS * fastest.mean_us):
            break
        try:
            plan = best if layout == best.layout else search(at_mean, [layout])
            judged.append(judge(profile, plan, data, factors, options))
        except InfeasiblePlan:
            continue
        except ConfigError as error:
            not_drawn = error  # such as batches that packs of this micro batch size cannot hold
            continue
        if not is_safe(judged[-1], options):
            if fastest is not None and judged[-1].mean_us > fastest.mean_us:
                continue  # its safe plans are slower
            judged += safe_splits(profile, at_mean, layout, data, factors, options, search)
        safe = [one for one in judged if is_safe(one, options)]
        fastest = min(safe, key=lambda one: (one.mean_us, one.plan.layout.label()), default=None)
    if fastest is None:
        raise not_drawn if not judged and not_drawn is not None else none_is_safe(judged, options, data)
    return with_record(profile, fastest, judged, data, factors, options)


def safe_splits(
    profile: Profile,
    at_mean: Profile,
    layout: Layout,
    data: Distribution,
    factors: SampleFactors,
    options: SpreadOptions,
    search: Search,
) -> list[Judged]:
    """Return the safe splits of a layout, the fastest last.

    Bisects the microbatch size that must fit, from the mean one to slightly more than the largest.
    """
    found: list[Judged] = []
    low, high = 0.0, 1.0
    # The first one is the middle; a split that fits the largest everywhere is tried if no smaller one is safe.
    for left in reversed(range(_NUM_HALVINGS)):
        share = high if high == 1.0 and not left else (low + high) / 2
        try:
            plan = _at_mean(at_mean, search(mean_profile(profile, data, factors, share), [layout]))
        except InfeasiblePlan:
            high = share
            continue
        memory = _chance(PlanUnderData(profile, plan, factors), profile, plan, data, options)
        if memory.probability <= options.max_oom_probability:
            found.append(judge(profile, plan, data, factors, options, memory))
            high = share
        else:
            low = share
    return found


def is_safe(judged: Judged, options: SpreadOptions) -> bool:
    """Return whether the probability of running out of memory is small enough."""
    return judged.memory.probability <= options.max_oom_probability


def none_is_safe(judged: Sequence[Judged], options: SpreadOptions, data: Distribution) -> InfeasiblePlan:
    """Return the error with the nearest of ``judged``, the longest sample, and the remedies."""
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


def plan_key(plan: Plan) -> str:
    """Return a plan's identity: layout, split and recompute."""
    return plan.layout.label() + repr([(stage.layers, stage.recompute) for stage in plan.stages])


def considered_plan(one: Judged) -> ConsideredPlan:
    """Return the row of a record."""
    label, step_us, p95_us = one.plan.layout.label(), one.plan.step.total_us, one.quantile_us(0.95)
    oom = one.memory.probability
    return ConsideredPlan(label=label, by_means_us=step_us, mean_us=one.mean_us, p95_us=p95_us, oom_probability=oom)


def _at_mean(profile: Profile, plan: Plan) -> Plan:
    """Return ``plan`` with the times and bytes of ``profile``, which is that of the mean sample."""
    layout = plan.layout
    found = evaluate(profile, plan.cluster, layout, ModulePlacement.of_plan(plan), plan.global_batch_size)
    again = plan_of(profile, plan.cluster, layout, found, plan.global_batch_size, plan.search)
    return replace(again, search=replace(plan.search, limits=limits_of_plan(found), scope=_SCOPE))


def judge(
    profile: Profile,
    plan: Plan,
    data: Distribution,
    factors: SampleFactors,
    options: SpreadOptions,
    memory: OutOfMemory | None = None,
) -> Judged:
    """Draw steps of ``plan`` under ``profile`` (as measured) and bound its probability of running out of memory.

    ``memory``: this bound, if it is known. Raises ``ConfigError`` for layouts whose steps are not modelled.
    """
    under = PlanUnderData(profile, plan, factors)
    memory = memory or _chance(under, profile, plan, data, options)
    return Judged(plan=plan, drawn=under.drawn(data), is_balanced=options.is_balanced, memory=memory)


def _chance(
    under: StepsUnderData, profile: Profile, plan: Plan, data: Distribution, options: SpreadOptions
) -> OutOfMemory:
    shape, work = under.shape, under.work()

    def ways(sizes: Array) -> list[Array]:
        if options.arrangement == "none":
            return [in_order(sizes, work, shape).samples]
        if options.arrangement == "replica":
            return [as_loaded(sizes, work, shape, is_exchanged=False)]
        found = [balance(sizes, work, shape).samples]
        if options.is_exchanged and shape.micro_batch_size > 1:
            found.append(as_loaded(sizes, work, shape, is_exchanged=True))
        return found

    most = options.max_oom_probability
    return out_of_memory(profile, plan, data, under.factors, options.oom_steps, options.arrangement, ways, most)


def with_record(
    profile: Profile,
    best: Judged,
    judged: Sequence[Judged],
    data: Distribution,
    factors: SampleFactors,
    options: SpreadOptions,
) -> Plan:
    """Return the plan of ``best`` with its data record, which lists all ``judged`` plans."""
    packed = PlanUnderData(profile, best.plan, sample_factors(profile, data, "none")).drawn(data)
    record = data_record(best, _considered(best, judged), packed, data, factors, options)
    return replace(best.plan, data=record)


def data_record(
    best: Judged,
    considered: Sequence[Judged],
    packed: DrawnSteps,
    data: Distribution,
    factors: SampleFactors,
    options: SpreadOptions,
    memory_note: str = "",
) -> DataRecord:
    """Return the record of ``best`` and the plans ``considered``; ``packed``: its steps without padding."""
    return DataRecord(
        sha256=data.source.sha256,
        num_draws=NUM_DRAWS,
        padding=options.padding,
        is_balanced=options.is_balanced,
        by_means_us=best.plan.step.total_us,
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
        considered=tuple(map(considered_plan, considered)),
        notes=factors.notes,
        memory_note=memory_note,
    )


def _considered(best: Judged, judged: Sequence[Judged]) -> list[Judged]:
    """Return the plans to list, by drawn steps: the chosen one, the best for the mean sample, and other fast ones."""
    by_means = min(judged, key=lambda one: one.plan.step.total_us)
    first = list({id(one): one for one in (by_means, best, *sorted(judged, key=lambda one: one.mean_us))}.values())
    return sorted(first[:_MAX_CONSIDERED], key=lambda one: one.mean_us)
