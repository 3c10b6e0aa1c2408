"""The part of a plan that describes its data."""

from __future__ import annotations

from dataclasses import dataclass


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
    mean_error_us: float = 0.0
    """Upper bound of the standard error of ``mean_us``; 0: unknown."""
    considered: tuple[ConsideredPlan, ...] = ()
    notes: tuple[str, ...] = ()
    memory_note: str = ""
    """Basis of the memory plan if the probability of running out is unknown."""
