"""The JSON document of ``--auto-tuning`` (``auto_tuning_result.json``), key by key.

A name that ends in ``_ms`` counts milliseconds, one in ``_bytes`` bytes on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict


class Recomputed(TypedDict):
    """The recompute kind, and the number of recomputed layers per stage."""

    kind: str
    layers_per_stage: list[int]


class RankMemory(TypedDict):
    """The predicted peak of a pipeline rank, its point in the step, and its terms."""

    pipeline_rank: int
    peak_bytes: float
    limit_bytes: float
    peak_point: str
    terms: Mapping[str, float]


class SampleSpread(TypedDict):
    """Steps over drawn batches of samples that differ, and a bound on the chance to run out of memory."""

    mean_ms: float
    p50_ms: float
    p95_ms: float
    balanced_mean_ms: float
    """Mean step with ``--data-balance``."""
    oom_probability: float
    oom_steps: int


class ConfigurationOfEqualSamples(TypedDict):
    """The record of a recommended configuration."""

    number: int
    """1 is the fastest."""
    label: str
    parallel: dict[str, int | bool]
    micro_batch_size: int
    global_batch_size: int
    settings: dict[str, object]
    environment: dict[str, str]
    modelled: list[str]
    """Switches whose effect is not measured."""
    layers_per_stage: list[int]
    recompute: Recomputed
    step_time_ms: float
    step_time_interval_ms: list[float]
    bubble_fraction: float
    peak_memory_gib: float
    memory: list[RankMemory]
    limits: list[str]
    tokens_per_s_per_device: float
    argv: list[str]
    take_out: list[str]
    """Words to remove from the user's command, because they would remain effective with ``argv``."""
    command: str
    plan: str
    """Name of the plan file."""


class Configuration(ConfigurationOfEqualSamples, total=False):
    """A recommended configuration."""

    samples: SampleSpread
    """With ``--auto-parallel-data``; ``step_time_ms`` is then the drawn mean."""


class Baseline(TypedDict, total=False):
    """The prediction for the script's own configuration, or the reason for a missing one."""

    reason: str
    label: str
    step_time_ms: float
    peak_bytes: float
    limit_bytes: float
    fits: bool


class RankPeak(TypedDict):
    """Predicted and measured peak of a pipeline rank."""

    pipeline_rank: int
    predicted_bytes: float
    measured_bytes: float


class Verified(TypedDict, total=False):
    """The measurements of a configuration by a verifying launch, or the reason for missing ones."""

    number: int
    status: str
    reason: str
    predicted_step_ms: float
    measured_step_ms: float
    step_error: float
    predicted_peak_bytes: float
    measured_peak_bytes: float
    memory_error: float
    stages: list[RankPeak]
    note: str
    calibration: str
    """Changes that the run made to the device file, if there is one."""


class Knowledge(TypedDict):
    """The measured share of the operators' time, and the host time of a call."""

    file: str
    covered_time_share: float
    num_interpolated: int
    host_us_per_call: float
    kernel_scale: float
    num_blocks_measured: int
    relative_error: float


class SearchCounts(TypedDict):
    """Numbers of combinations by outcome."""

    num_candidates: int
    num_legal: int
    num_solved: int
    num_bounded: int
    num_without_room: int
    seconds: float
    lower_bound_ms: float


class _Result(TypedDict):
    schema_version: int
    ranks: int
    devices_per_node: int
    device: str
    profile_source: str
    launches: list[dict[str, object]]
    """Launches, as in ``launches.json``."""
    num_device_launches: int
    knowledge: Knowledge
    searched: dict[str, str]
    left_out_dimensions: dict[str, str]
    """Reasons by dimension."""
    left_out: dict[str, int]
    """Numbers of combinations by rule."""
    as_given: Baseline
    search: SearchCounts
    notes: list[str]
    top: list[Configuration]


class TuningResult(_Result, total=False):
    """The whole document."""

    verified: list[Verified]
    """With ``--auto-tuning-verify``."""
