"""The parts of a plan file: stages, memory, times, alternatives, and the record of the search."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_autoparallel.spec.layout import Layout


@dataclass(frozen=True, kw_only=True)
class ConsideredPlan:
    """One of the best plans for the mean sample, evaluated on the distribution."""

    label: str
    by_means_us: float
    """Step if every sample equalled the mean sample."""
    mean_us: float
    p95_us: float
    oom_probability: float
    """Upper bound of the probability of running out of memory within the requested steps."""


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """Step times over drawn global batches, in microseconds."""

    sha256: str
    """Hash of the records, to detect another data set."""
    num_draws: int
    padding: str
    is_balanced: bool
    """Whether training rearranges samples between replicas and microbatches."""
    by_means_us: float
    mean_us: float
    p50_us: float
    p95_us: float
    balanced_mean_us: float
    """Mean step with rearrangement."""
    packed_mean_us: float
    """Mean step with rearrangement and without padding."""
    imbalance: float
    """Work of the slowest replica divided by the mean, in the order of the data."""
    oom_probability: float
    oom_steps: int
    worst_bytes: int
    """Peak of the rank most likely to run out of memory, if the heaviest microbatches coincide."""
    worst_rank: int
    tokens_per_sample: float = 0.0
    """Mean tokens of a sample, without padding; 0: unknown."""
    mean_error_us: float = 0.0
    """Upper bound of the standard error of ``mean_us``; 0: unknown."""
    considered: tuple[ConsideredPlan, ...] = ()
    notes: tuple[str, ...] = ()
    memory_note: str = ""
    """Basis of the memory plan if the probability of running out is unknown."""


@dataclass(frozen=True, kw_only=True)
class PlannedFrom:
    """The inputs of a plan, so that it can be predicted again without the profile; empty: unknown."""

    link_us: tuple[float, ...] = ()
    """Times of the messages between stages."""
    costs: dict[str, Any] = field(default_factory=dict)
    """The profile reduced to the plan's point, in the file's format."""
    stage_times_us: tuple[tuple[float, ...], ...] = ()
    """Planned forward and backward time of every virtual stage, to detect edits."""
    unoverlapped_us: float = 0.0
    """Step of the same layers in the same layout without ``--tp-comm-overlap``, if the plan was priced with it."""


EDITED = "edited"
"""Status of a plan changed by hand: it was not searched, and nothing is proved about it."""
ROUNDING = 1e-6
"""Gap up to which a plan counts as optimal: rounding to nanoseconds."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One virtual stage: its layers, and the time of one microbatch."""

    stage: int
    """Position in the chain, 0 to pipeline_size x virtual_size - 1."""
    pipeline_rank: int
    chunk: int
    """Model chunk on that rank; 0 without VPP."""
    layers: dict[str, int]
    """Module name to number of layers here."""
    first_layer: dict[str, int]
    """Module name to the global index of its first layer here (of modules with layers here)."""
    recompute: dict[str, dict[str, int]]
    """Module name to recompute kind (``selective``, ``full``) to number of layers, the first ones of the stage."""
    forward_us: float
    backward_us: float
    """Backward time with recompute, without waiting for others."""
    prediction: bool = False
    """Whether multi-token prediction layers are here, apart from the loss; by default they are with the loss."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Predicted peak on the devices of one pipeline rank, with the terms that add up to it."""

    pipeline_rank: int
    peak_bytes: int
    limit_bytes: int
    peak_point: str
    """Point of the peak: ``backward of text_decoder layer 13``, ``optimizer step``, ..."""
    terms: dict[str, int]
    """Bytes by name; their sum is ``peak_bytes``."""
    runtime_overhead_bytes: int = 0
    """Part of ``terms`` that is not tensors (contexts, communicators): absent from tracked live bytes."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One training step by its parts; the search minimises ``total_us``."""

    total_us: float
    pipeline_us: float
    """First forward to last backward by exact simulation."""
    data_parallel_us: float = 0.0
    """Gradient reduction (and parameter gathering) that is not hidden."""
    optimizer_us: float = 0.0
    embedding_us: float = 0.0
    bubble_fraction: float = 0.0
    """Share of the pipeline time that the average rank spends waiting."""
    p50_us: float | None = None
    p95_us: float | None = None
    """95th percentile over sampled microbatches of variable data; absent for constant data."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The result of a common rule of thumb in the chosen layout, or the best plain recipe of all layouts."""

    name: str
    """``even``, ``greedy`` or ``plain``: one chunk per rank, even layers, the same recompute on every stage."""
    step_us: float | None
    feasible: bool
    layers: dict[str, tuple[int, ...]]
    recompute: dict[str, tuple[int, ...]]
    note: str = ""
    layout: Layout | None = None
    """Layout of ``plain``; the others use the plan's layout."""

    @property
    def title(self) -> str:
        """Return the displayed name: ``even split``, ``best plain recipe, PP2 TP4 ...``."""
        return f"best plain recipe, {self.layout.label()}" if self.layout is not None else f"{self.name} split"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A slower plan: the best split of another layout."""

    layout: Layout
    step_us: float
    """Mean of drawn steps if samples differ."""
    lower_bound_us: float | None
    """``None`` for a mean of drawn steps, which no search bounds."""
    layers: dict[str, tuple[int, ...]]
    recompute: dict[str, tuple[int, ...]]
    peak_bytes: int
    recompute_kinds: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    prediction_stage: int | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one configuration."""

    layout: Layout
    outcome: str
    """``solved``, ``bounded`` (a proved bound is no better than the best), ``memory`` (no split fits), ``illegal``,
    ``unmeasured`` (the profile does not cover it), ``excluded`` (not requested) or ``unsolved`` (the time limit came
    first)."""
    reason: str
    lower_bound_us: float | None = None
    step_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """The optimum's gain if one limit moved; found by solving again."""

    change: str
    step_us: float | None
    gain_fraction: float | None


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """The course of the search and its proof."""

    status: str
    """``optimal`` (proved), ``feasible`` (stopped at the time limit), ``improved`` (every layout was solved or proved
    slower, but the layers of a pipeline were placed by local search), ``edited`` (by hand: nothing is proved)."""
    lower_bound_us: float
    """No plan of the whole space is faster than this, under the cost model."""
    gap_fraction: float
    num_configurations: int
    num_solved: int
    seconds: float
    verdicts: tuple[Verdict, ...] = ()
    scope: str = ""
    """The searched splits of a layout, if not all: those that the host runs."""
    limits: tuple[str, ...] = ()
    """The best plan's bottlenecks, most important first."""
    relaxations: tuple[Relaxation, ...] = ()

    @property
    def without_proof(self) -> SearchRecord:
        """Return the record of a plan that differs from the searched one: no proof and no comparison holds for it."""
        return replace(self, status=EDITED, lower_bound_us=0.0, gap_fraction=0.0, relaxations=(), verdicts=())


@dataclass(frozen=True, kw_only=True)
class ProfileRecord:
    """The profile that the plan is based on."""

    sha256: str
    source: str
    """``measured``, ``analytic`` or ``imported``."""
    device: str
    created_utc: str
    model_hash: str
    notes: tuple[str, ...] = ()
    """Notes on interpolated and assumed values."""
    train: dict[str, object] = field(default_factory=dict)
    """Training switches that computed costs assume, as in the section ``train`` of a request."""
