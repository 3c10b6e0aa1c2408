"""The plan of a sharded training: its configuration, predicted time and memory, and proof."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.spec.codec import JsonFile
from mindspeed_autoparallel.spec.layout import Cluster
from mindspeed_autoparallel.spec.plan_records import ProfileRecord
from mindspeed_autoparallel.spec.sharded import ShardedDecisions, ShardSizes

SHARDED_PLAN_FORMAT = "mindspeed-autoparallel/sharded-plan"
SHARDED_PLAN_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ShardedStep:
    """One step on one device by its queues; the search minimises ``total_us``."""

    total_us: float
    compute_us: float
    """Busy time of the compute queue, including recomputation and exchanges."""
    recompute_us: float
    """Part of ``compute_us``: recomputed forward passes."""
    exchange_us: float
    """Part of ``compute_us``: exchanges of heads, of keys and of tokens with their experts."""
    gather_us: float
    """Busy time of the gather queue; hidden or not."""
    reduce_us: float
    host_copy_us: float
    exposed_us: float
    """Time that the compute queue waits for other queues."""
    optimizer_us: float


@dataclass(frozen=True, kw_only=True)
class ShardedMemory:
    """Predicted peak of a device, with the terms that add up to it."""

    peak_bytes: int
    limit_bytes: int
    peak_point: str
    """Point of the peak: ``backward of model.language_model.layers.47``."""
    terms: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class ShardedOutcome:
    """One configuration with its price: the shipped one, a rule of thumb, or the best of other sizes."""

    name: str
    decisions: ShardedDecisions
    step: ShardedStep
    memory: ShardedMemory
    feasible: bool
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ShardedVerdict:
    """The result for one choice of sizes."""

    sizes: ShardSizes
    outcome: str
    """``solved``, ``bounded`` (no faster than the best, proved), ``memory`` (nothing fits), ``illegal``, ``unmeasured``
    or ``unsolved`` (the time limit came first)."""
    reason: str
    lower_bound_us: float | None = None
    step_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class ShardedSearch:
    """The course of the search and its proof."""

    status: str
    """``optimal`` (proved), ``feasible`` (with a gap) or ``given`` (priced, not searched)."""
    lower_bound_us: float
    gap_fraction: float
    num_sizes: int
    num_solved: int
    seconds: float
    verdicts: tuple[ShardedVerdict, ...] = ()
    scope: str = ""
    """The extent of the search and its omissions."""


@dataclass(frozen=True, kw_only=True)
class ShardedPlan(JsonFile):
    """``plan.json`` of a sharded training."""

    WHAT, AGAIN, ERROR = "plan of a sharded training", "Plan again with this release.", PlanError

    model: str
    cluster: Cluster
    host: str
    decisions: ShardedDecisions
    step: ShardedStep
    memory: ShardedMemory
    tokens_per_s_per_device: float
    baselines: tuple[ShardedOutcome, ...]
    alternatives: tuple[ShardedOutcome, ...]
    search: ShardedSearch
    profile: ProfileRecord
    tool_version: str
    source_files: tuple[str, ...] = ()
    """Input files of the plan: the YAML, the model's config.json."""
    format: str = SHARDED_PLAN_FORMAT
    schema_version: int = SHARDED_PLAN_SCHEMA_VERSION
