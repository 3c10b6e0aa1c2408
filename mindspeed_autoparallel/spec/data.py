"""The part of a plan that describes the data it was chosen for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ConsideredPlan:
    """One of the best plans by means, judged by the distribution."""

    label: str
    by_means_us: float
    """Step if every sample were the mean one."""
    mean_us: float
    p95_us: float
    oom_probability: float
    """Upper bound of the probability of running out of memory within the requested steps."""


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """Times in microseconds, over drawn global batches."""

    sha256: str
    """Of the records; another data set has another one."""
    num_draws: int
    padding: str
    is_balanced: bool
    """Samples are rearranged between replicas and microbatches while training."""
    by_means_us: float
    mean_us: float
    p50_us: float
    p95_us: float
    balanced_mean_us: float
    """With rearrangement."""
    packed_mean_us: float
    """With rearrangement and without padding."""
    imbalance: float
    """Work of the slowest replica over that of the mean one, in the order of the data."""
    oom_probability: float
    oom_steps: int
    worst_bytes: int
    """Peak of the rank likeliest to run out, if the heaviest microbatches came together."""
    worst_rank: int
    mean_error_us: float = 0.0
    """Standard error of ``mean_us``, an upper bound; 0: not known."""
    considered: tuple[ConsideredPlan, ...] = ()
    notes: tuple[str, ...] = ()
    memory_note: str = ""
    """Where no probability of running out is known: what memory was planned for."""
