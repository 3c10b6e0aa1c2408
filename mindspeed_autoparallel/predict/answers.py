"""The JSON documents that ``predict`` and ``scoreboard`` print, key by key.

A name that ends in ``_ms`` counts milliseconds, one in ``_gib`` binary gigabytes on one rank.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class StageAnswer(TypedDict):
    """Memory and time of a pipeline rank."""

    stage: int
    peak_memory_gib: float
    first_step_peak_gib: float
    parameters_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    transient_gib: float
    workspace_gib: float
    microbatch_ms: float


class Answer(TypedDict, total=False):
    """The answer to a request; one with an ``error`` has its id, the reason and notes only."""

    id: object
    """The request's id."""
    status: Literal["ok", "out_of_memory", "error"]
    reason: str
    notes: list[str]
    assumed: str
    """Assumed switches that the request leaves open, without which the run does not fit."""
    step_time_ms: float
    step_time_interval_ms: list[float]
    step_time_extrapolation: str
    step_time_parts_ms: dict[str, float]
    bubble_fraction: float
    peak_memory_gib: float
    peak_memory_interval_gib: list[float]
    stages: list[StageAnswer]
    tokens_per_s_per_device: float
    mfu: float | None
    """Share of the 16-bit peak that the model's own operations reach, without recompute; none without a known peak."""
    profile_source: str
    device: str
    stack: str
    provenance: str


class Choice(Answer, total=False):
    """One of the fastest plans that ``tune`` found: step and memory are the plan's."""

    parallel: dict[str, object]
    train: dict[str, object]
    argv: list[str]
    """Flags of ``host``; empty where none describe the plan."""
    host: str
    tokens_per_s: float
    """Throughput of all devices together."""
    free_memory_gib: float
    layers: list[int]
    recomputed: dict[str, list[int]]


class ExperimentAnswer(TypedDict):
    """A run on few devices that narrows the figures that decide the choice."""

    parallel: dict[str, object]
    train: dict[str, object]
    num_devices: int
    device_seconds: float
    narrows: list[str]
    worst_regret_after: float


class DecisionAnswer(TypedDict):
    """The certainty of the choice between the plans; plans are given by rank, from 1."""

    fastest: int
    safest: int
    worst_regret: dict[str, float]
    undecided: list[int]
    settling: int | None
    settling_parallel: dict[str, object] | None
    hangs_on: dict[str, float]
    experiments: list[ExperimentAnswer]


class Tuning(TypedDict, total=False):
    """The output of ``tune --json``."""

    schema_version: int
    profile_source: str
    num_candidates: int
    num_solved: int
    status: str
    gap_fraction: float
    lower_bound_ms: float
    seconds: float
    left_out: dict[str, int]
    top: list[Choice]
    decision: DecisionAnswer


class Predictions(TypedDict):
    """Answers in the order of their requests."""

    schema_version: int
    predictions: list[Answer]


class Errors(TypedDict):
    """Relative errors of predictions over ``rows`` measured runs."""

    rows: int
    mean_absolute: float
    mean: float
    worst_over: float
    worst_under: float


class GroupErrors(TypedDict, total=False):
    """Figures of a data group; unmeasured ones are absent."""

    step_time: Errors
    ranking: dict[str, float]
    peak_memory: Errors
    peak_memory_above_10_gib: Errors
    activation_memory: Errors
    parameter_memory: Errors


class Scoreboard(TypedDict):
    """Errors by data group, and how many rows were left out for which reason."""

    schema_version: int
    groups: dict[str, GroupErrors]
    left_out: dict[str, int]
