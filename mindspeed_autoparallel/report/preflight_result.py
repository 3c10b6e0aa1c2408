"""The measurements of a pre-flight, rank by rank: ``preflight_result.json``. Bytes, microseconds."""

from __future__ import annotations

from dataclasses import dataclass, field

PREFLIGHT_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """A forward or backward of one microbatch on one model chunk of the rank."""

    kind: str
    """``F`` or ``B``."""
    chunk: int
    microbatch: int
    us: float


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The measurements of one process that ran as one rank."""

    rank: int
    status: str
    """``ok``, ``out_of_memory``, ``no_step`` (the script ended before its steps were done) or ``failed``."""
    num_steps: int = 0
    """Completed steps."""
    peak_bytes: int = 0
    """Peak of tensors (the allocator's allocated bytes)."""
    reserved_bytes: int | None = None
    """Peak of the device memory that the allocator held; ``None`` without such an allocator."""
    peak_place: str = ""
    resident_bytes: int = 0
    """Bytes held before a step begins: parameters, gradients, optimizer."""
    places: dict[str, int] = field(default_factory=dict)
    """Peak bytes by phase: forward, backward, recompute, optimizer step, between passes."""
    layer_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that a layer's forward keeps for its backward."""
    passes: tuple[PassTime, ...] = ()
    """Passes of the last timed step, in the order they ran."""
    optimizer_us: float = 0.0
    step_us: float = 0.0
    """Step time of this rank alone, without waiting for others."""
    reason: str = ""
    """Reason for a status other than ``ok``."""
    seconds: float = 0.0
    """Run time of the whole child process."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank that ran, and the ranks that it represents."""

    run: RankRun
    pipeline_rank: int
    stands_for: tuple[int, ...]
    """Ranks with the same contents, including itself."""
    why: str
    predicted_bytes: int | None
    """Peak of tensors by the plan; ``None`` without a plan."""


@dataclass(frozen=True, kw_only=True)
class PreflightResult:
    """The document ``preflight_result.json``."""

    layout: str
    world_size: int
    plan: str
    """The plan's path; empty: the script's own layout."""
    device: str
    limit_bytes: int
    limit_source: str
    ranks: tuple[RankReport, ...]
    num_ranks_covered: int
    """Number of ranks that the ranks run represent."""
    replay_us: float | None
    """Step of the layout by replay of the measured passes, without communication; ``None``: see ``replay_note``."""
    replay_note: str
    predicted_us: float | None
    verdict: str
    """``fits``, ``runs_out`` or ``unknown``."""
    verdict_text: str
    advice: tuple[str, ...]
    samples_differ: bool
    """Whether replicas get samples of other lengths, so that their peaks differ from that of the replica that ran."""
    schema_version: int = PREFLIGHT_SCHEMA_VERSION
