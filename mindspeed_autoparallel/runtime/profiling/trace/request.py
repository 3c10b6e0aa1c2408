"""Requests to trace a block of a language model or a running pipeline stage in a layout, and the resulting trace."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypedDict

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.profiles.records import record_of
from mindspeed_autoparallel.spec.recompute import is_known

BLOCKS = ("layer", "embedding", "head", "stage")
_DISPATCHERS = ("alltoall", "allgather")
_EXCHANGES = ("allgather", "a2a")
_DTYPES = ("bfloat16", "float16", "float32")
_NEVER_ZERO = (
    *("hidden", "heads", "sequence", "micro_batch", "num_layers", "tensor", "context", "expert", "pipeline"),
    *("virtual", "num_microbatches"),
)


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """The block to trace, with one microbatch (a stage: ``num_microbatches``), and its layout; sizes are counts."""

    hidden: int
    heads: int
    sequence: int
    block: str = "layer"
    """``layer``, ``embedding``, ``head`` (final norm, output projection and loss), or ``stage``: the step of one
    pipeline rank, through Megatron's own schedule."""
    micro_batch: int = 1
    kv_heads: int = 0
    """0: as many as ``heads``."""
    head_size: int = 0
    """0: ``hidden / heads``."""
    ffn: int = 0
    """0: four times ``hidden``."""
    gated: bool = False
    vocabulary: int = 0
    """Padded; needed by every block but ``layer``."""
    num_layers: int = 1
    """Layers of the whole model; a stage has its share."""
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0
    """0: the tensor size."""
    pipeline: int = 1
    virtual: int = 1
    stage: int = 0
    """The pipeline rank that is traced."""
    num_microbatches: int = 1
    world: int = 0
    """0: the smallest world that holds the layout."""
    sequence_parallel: bool = False
    num_experts: int = 0
    topk: int = 2
    expert_ffn: int = 0
    """0: as ``ffn``."""
    shared_ffn: int = 0
    context_exchange: str = "allgather"
    """Communication of attention over context ranks: ``allgather``, or ``a2a``, which exchanges rows for heads."""
    dispatcher: str = "alltoall"
    """Dispatch of tokens to experts: ``alltoall`` or ``allgather``."""
    recompute: str = "none"
    """A policy of ``spec.recompute``; ``full:LAYERS`` has an effect in a stage only."""
    dtype: str = "bfloat16"

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the world in which the block is traced."""
        experts = -(-self.expert * self.tensor_of_experts // self.tensor)
        return self.world or self.tensor * self.pipeline * math.lcm(self.context, experts)

    @property
    def tensor_of_experts(self) -> int:
        """Return the number of ranks that share one expert's matrices."""
        return self.expert_tensor or self.tensor

    @property
    def rank(self) -> int:
        """Return the global rank that is traced: the first of its stage."""
        return self.num_ranks // self.pipeline * self.stage

    def key(self) -> str:
        """Return the SHA-256 of the whole request, in hex."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def read_request(values: Mapping[str, object]) -> TraceRequest:
    """Return a request from plain data; raises ``ConfigError`` with the key, the value and the rule."""
    known = {item.name for item in fields(TraceRequest)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"unknown keys {unknown}; known: {sorted(known)}.")
    if missing := sorted({"hidden", "heads", "sequence"} - set(values)):
        raise ConfigError(f"missing: {', '.join(missing)}; without a script the model is described by them.")
    request = record_of(values, "the block to trace", TraceRequest)
    _check(request)
    return request


def _check(request: TraceRequest) -> None:
    for name, value in vars(request).items():
        least = int(name in _NEVER_ZERO)
        if isinstance(value, int) and value < least:
            raise ConfigError(f"{name} is {value}, must be at least {least}.")
    choices = {"block": BLOCKS, "dispatcher": _DISPATCHERS, "context_exchange": _EXCHANGES, "dtype": _DTYPES}
    for name, allowed in choices.items():
        if getattr(request, name) not in allowed:
            raise ConfigError(f"{name} is {getattr(request, name)!r}, must be one of {', '.join(allowed)}.")
    if not is_known(request.recompute):
        raise ConfigError(
            f"recompute is {request.recompute!r}, must be none, selective, full, selective:MODULE,... or full:LAYERS."
        )
    if not request.head_size and request.hidden % request.heads:
        raise ConfigError(f"hidden {request.hidden} is not divisible by heads {request.heads}.")
    if request.kv_heads and request.heads % request.kv_heads:
        raise ConfigError(f"heads {request.heads} is not divisible by kv_heads {request.kv_heads}.")
    for name in ("heads", "ffn", "vocabulary", "shared_ffn"):
        if getattr(request, name) % request.tensor:
            raise ConfigError(f"{name} {getattr(request, name)} is not divisible by tensor {request.tensor}.")
    if request.sequence % (2 * request.context if request.context > 1 else 1):
        raise ConfigError(f"sequence {request.sequence} is not divisible by 2 x context {request.context}.")
    if request.sequence_parallel and request.sequence // request.context % request.tensor:
        raise ConfigError(f"sequence {request.sequence} cannot be split over tensor {request.tensor} as well.")
    if request.block != "layer" and not request.vocabulary:
        raise ConfigError(f"vocabulary is needed to trace {request.block}.")
    if request.num_ranks % (request.tensor * request.context * request.pipeline):
        raise ConfigError(
            f"world {request.num_ranks} is not a multiple of tensor {request.tensor} x context {request.context} x "
            f"pipeline {request.pipeline}."
        )
    _check_experts(request)
    _check_stage(request)


def _check_experts(request: TraceRequest) -> None:
    shards = request.expert * request.tensor_of_experts
    if not request.num_experts and request.expert > 1:
        raise ConfigError(f"expert {request.expert} needs num_experts.")
    if request.num_experts % request.expert:
        raise ConfigError(f"{request.num_experts} experts are not divisible by expert {request.expert}.")
    if request.num_experts and request.num_ranks // request.pipeline % shards:
        raise ConfigError(
            f"expert {request.expert} x expert_tensor {request.tensor_of_experts} does not divide the "
            f"{request.num_ranks // request.pipeline} ranks of a stage."
        )
    if request.num_experts and not 1 <= request.topk <= request.num_experts:
        raise ConfigError(f"topk {request.topk} must be 1 to {request.num_experts}.")
    if request.num_experts and request.tensor > 1 and not request.sequence_parallel:
        raise ConfigError("experts under tensor parallelism need sequence_parallel.")


def _check_stage(request: TraceRequest) -> None:
    if request.block != "stage":
        return
    if request.num_layers % (request.pipeline * request.virtual):
        raise ConfigError(
            f"{request.num_layers} layers cannot be split over pipeline {request.pipeline} x virtual {request.virtual}."
        )
    if request.stage >= request.pipeline:
        raise ConfigError(f"stage {request.stage} must be below pipeline {request.pipeline}.")
    if request.virtual > 1 and (request.pipeline == 1 or request.num_microbatches % request.pipeline):
        raise ConfigError(
            f"virtual {request.virtual} needs pipeline above 1 and microbatches ({request.num_microbatches}) in "
            f"multiples of pipeline {request.pipeline}."
        )


class OperatorCount(TypedDict):
    """Equal calls of an operator; ``shapes``: of its tensor arguments."""

    name: str
    shapes: list[list[int]]
    count: int


class CollectiveCount(TypedDict):
    """Equal calls on process groups; ``size_bytes``: the largest tensor of one."""

    name: str
    size_bytes: int
    count: int


class Phase(TypedDict):
    """Calls of one phase; live bytes at its end and the peak so far, of storages that phases created."""

    operators: list[OperatorCount]
    collectives: list[CollectiveCount]
    peak_bytes: int
    live_bytes: int


class BlockResult(TypedDict, total=False):
    """One rank's share of a block (``forward``, ``backward``) or a stage's step (``step``), or ``error``, a reason."""

    schema_version: int
    block: str
    parameter_count: int
    saved_bytes: int
    """Distinct storages kept for the backward."""
    output_bytes: int
    forward: Phase
    backward: Phase
    step: Phase
    error: str
