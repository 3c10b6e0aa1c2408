"""What a plan file is made of: stages, memory, times, what lost, and the record of the search."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_autoparallel.spec.layout import Layout

EDITED = "edited"
"""Status of a plan that was changed by hand: it was never searched, and nothing is proved about it."""
ROUNDING = 1e-6
"""A gap of no more than this is rounding to nanoseconds: the plan is called optimal."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One virtual stage: what it holds and how long one microbatch takes on it."""

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
    """Module name to recompute kind (``selective``, ``full``) to number of layers; they are the first of the stage."""
    forward_us: float
    backward_us: float
    """With recompute, without the wait for others."""
    prediction: bool = False
    """Whether layers of multi-token prediction are here, apart from the loss; elsewhere they are beside it."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Predicted peak on the devices of one pipeline rank, with the terms that add up to it."""

    pipeline_rank: int
    peak_bytes: int
    limit_bytes: int
    peak_point: str
    """Where the peak is: ``backward of text_decoder layer 13``, ``optimizer step``, ..."""
    terms: dict[str, int]
    """Bytes by name; their sum is ``peak_bytes``."""
    runtime_overhead_bytes: int = 0
    """Part of ``terms`` that is not tensors (contexts, communicators): absent from tracked live bytes."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One training step by its parts; ``total_us`` is what is minimised."""

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
    """Over sampled microbatches of variable data; absent when data are constant."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a common rule of thumb would give in the chosen layout, or the best plain recipe of all layouts."""

    name: str
    """``even``, ``greedy`` or ``plain``: one chunk per rank, even layers, the same recompute on every stage."""
    step_us: float | None
    feasible: bool
    layers: dict[str, tuple[int, ...]]
    recompute: dict[str, tuple[int, ...]]
    note: str = ""
    layout: Layout | None = None
    """Of ``plain``; the others are in the plan's own."""

    @property
    def title(self) -> str:
        """Return what people read: ``even split``, ``best plain recipe, PP2 TP4 ...``."""
        return f"best plain recipe, {self.layout.label()}" if self.layout is not None else f"{self.name} split"


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A distinct plan that lost: the best split of another layout."""

    layout: Layout
    step_us: float
    lower_bound_us: float
    layers: dict[str, tuple[int, ...]]
    recompute: dict[str, tuple[int, ...]]
    peak_bytes: int
    recompute_kinds: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    prediction_stage: int | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one configuration."""

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
    """What the optimum would gain if one limit moved; found by solving again."""

    change: str
    step_us: float | None
    gain_fraction: float | None


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """How the answer was found and what is proved about it."""

    status: str
    """``optimal`` (proved), ``feasible`` (stopped at the time limit), ``improved`` (every layout was solved or proved
    slower, but where the layers of a pipeline lie was improved step by step), ``edited`` (by hand: nothing is
    proved)."""
    lower_bound_us: float
    """No plan of the whole space is faster than this, under the cost model."""
    gap_fraction: float
    num_configurations: int
    num_solved: int
    seconds: float
    verdicts: tuple[Verdict, ...] = ()
    scope: str = ""
    """Which splits of a layout were searched, where that is not all of them: those that the host runs."""
    limits: tuple[str, ...] = ()
    """What holds the best plan back, most important first."""
    relaxations: tuple[Relaxation, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProfileRecord:
    """Which profile the plan rests on."""

    sha256: str
    source: str
    """``measured``, ``analytic`` or ``imported``."""
    device: str
    created_utc: str
    model_hash: str
    notes: tuple[str, ...] = ()
    """Everything that was interpolated or assumed."""
    train: dict[str, object] = field(default_factory=dict)
    """Switches of the training that computed costs rest on, as the section ``train`` of a request has them."""
