"""The samples of a distribution, and plans judged on them: drawn steps, and the probability of too little memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy

from mindspeed_autoparallel.data.balance import as_loaded, balance, in_order
from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.spread.drawn_steps import NUM_DRAWS, DrawnSteps, PlanUnderData, StepsUnderData
from mindspeed_autoparallel.planner.spread.draws import Array
from mindspeed_autoparallel.planner.spread.factors import SampleFactors, sample_factors
from mindspeed_autoparallel.planner.spread.memory import Arrangement, OutOfMemory, out_of_memory
from mindspeed_autoparallel.planner.spread.others import other_layouts
from mindspeed_autoparallel.planner.spread.scaled import mean_profile
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.spec.plan_records import ConsideredPlan, DataRecord
from mindspeed_autoparallel.units import format_bytes

MAX_LAYOUTS = 12
"""Number of layouts drawn once a safe plan is known, and of plans in a record, at most."""
_LARGER = "the split was searched with memory for larger microbatches than the mean one"


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
    top_k: int = 3
    """Alternatives to report."""

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
            wanted = "--data-padding none, which packs texts, and --data-balance, which forms the packs"
            raise ConfigError(f"--data-pack-length must be at least 1 and needs {wanted}; got {self.pack_length}.")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A plan with its drawn steps and its probability of running out of memory."""

    plan: Plan
    drawn: DrawnSteps
    options: SpreadOptions
    memory: OutOfMemory
    holds_larger: bool = False
    """Whether the split was searched with memory for larger microbatches than the mean one."""

    @property
    def is_safe(self) -> bool:
        """Return whether the probability of running out of memory is small enough."""
        return self.memory.probability <= self.options.max_oom_probability

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
    def row(self) -> ConsideredPlan:
        """Return the row of a record."""
        step_us, p95_us, chance = self.plan.step.total_us, self.quantile_us(0.95), self.memory.probability
        label, mean_us = self.plan.layout.label(), self.mean_us
        return ConsideredPlan(label=label, by_means_us=step_us, mean_us=mean_us, p95_us=p95_us, oom_probability=chance)

    @property
    def _steps(self) -> Array:
        return self.drawn.balanced if self.options.is_balanced else self.drawn.in_order


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples on which plans of ``profile`` are judged, and the requirements on such plans."""

    profile: Profile
    """As measured."""
    data: Distribution
    factors: SampleFactors
    options: SpreadOptions

    @staticmethod
    def of(profile: Profile, data: Distribution, options: SpreadOptions) -> Samples:
        """Return the samples of ``data`` with the factors of the profile's modules."""
        factors = sample_factors(profile, data, options.padding, options.pack_length)
        return Samples(profile=profile, data=data, factors=factors, options=options)

    def mean_profile(self, share: float = 0.0) -> Profile:
        """Return the profile at the mean sample; ``share``: see ``scaled.mean_profile``."""
        return mean_profile(self.profile, self.data, self.factors, share)

    def judge(self, plan: Plan, memory: OutOfMemory | None = None) -> Judged:
        """Draw steps of ``plan`` and bound its probability of running out of memory.

        ``memory``: this bound, if it is known. Raises ``ConfigError`` for layouts whose steps are not modelled.
        """
        under = PlanUnderData(self.profile, plan, self.factors)
        memory = memory or self.chance(plan, under)
        return Judged(plan=plan, drawn=under.drawn(self.data), options=self.options, memory=memory)

    def chance(self, plan: Plan, under: StepsUnderData) -> OutOfMemory:
        """Return a bound of the probability that ``plan`` runs out of memory."""
        shape, work, options = under.shape, under.work(), self.options

        def ways(sizes: Array) -> list[Array]:
            if options.arrangement == "none":
                return [in_order(sizes, shape)]
            if options.arrangement == "replica":
                return [as_loaded(sizes, work, shape, is_exchanged=False)]
            found = [balance(sizes, work, shape)]
            if options.is_exchanged and shape.micro_batch_size > 1:
                found.append(as_loaded(sizes, work, shape, is_exchanged=True))
            return found

        steps, most = options.oom_steps, options.max_oom_probability
        return out_of_memory(self.profile, plan, self.data, under.factors, steps, options.arrangement, ways, most)

    def none_is_safe(self, judged: Sequence[Judged]) -> InfeasiblePlan:
        """Return the error with the nearest of ``judged``, the longest sample, and the remedies."""
        data, options, record = self.data, self.options, self.data.source.longest_record
        name = f" ({record})" if record else ""
        memory = (nearest := min(judged, key=lambda one: one.memory.probability)).memory
        return InfeasiblePlan(
            f"none of {len(judged)} plans is safe: a probability of at most {options.max_oom_probability:g} to run out "
            f"of memory within {options.oom_steps} steps. Nearest is {nearest.plan.layout.label()}: at most "
            f"{memory.probability:.2g}; the heaviest samples together need {format_bytes(memory.worst_bytes)} of "
            f"{format_bytes(memory.limit_bytes)} on pipeline rank {memory.pipeline_rank}. The longest "
            f"sample{name} has {int(data.column('tokens')[0][-1])} tokens. Lower --seq-length, raise the probability "
            "allowed, or use more devices."
        )

    def with_record(self, best: Judged, judged: Sequence[Judged]) -> Plan:
        """Return the plan of ``best`` with its data record.

        It lists the fastest of ``judged`` by drawn steps, and the best for the mean sample.
        """
        unpadded = sample_factors(self.profile, self.data, "none")
        packed = PlanUnderData(self.profile, best.plan, unpadded).drawn(self.data)
        by_means = min(judged, key=lambda one: one.plan.step.total_us)
        first = list({one.row: one for one in (by_means, best, *sorted(judged, key=lambda one: one.mean_us))}.values())
        considered = sorted(first[:MAX_LAYOUTS], key=lambda one: one.mean_us)
        drawn = ((one.mean_us, one.plan) for one in judged if one.is_safe)
        others = other_layouts(best.plan, drawn, self.options.top_k)
        return replace(best.plan, alternatives=others, data=self.record(best, considered, packed))

    def record(
        self, best: Judged, considered: Sequence[Judged], packed: DrawnSteps, memory_note: str = ""
    ) -> DataRecord:
        """Return the record of ``best`` and the plans ``considered``; ``packed``: its steps without padding."""
        return DataRecord(
            sha256=self.data.source.sha256,
            num_draws=NUM_DRAWS,
            padding=self.options.padding,
            is_balanced=self.options.is_balanced,
            tokens_per_sample=self.data.mean_tokens,
            by_means_us=best.plan.step.total_us,
            mean_us=best.mean_us,
            p50_us=best.quantile_us(0.5),
            p95_us=best.quantile_us(0.95),
            balanced_mean_us=float(best.drawn.balanced.mean()),
            packed_mean_us=float(packed.balanced.mean()),
            mean_error_us=best.mean_error_us,
            imbalance=best.drawn.imbalance,
            oom_probability=best.memory.probability,
            oom_steps=self.options.oom_steps,
            worst_bytes=best.memory.worst_bytes,
            worst_rank=best.memory.pipeline_rank,
            considered=tuple(one.row for one in considered),
            notes=(*self.factors.notes, *[_LARGER] * best.holds_larger),
            memory_note=memory_note,
        )
