"""What is traced: one transformer layer's sizes and the layout it is built in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mindspeed_autoparallel.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LayerRequest:
    """Sizes are counts; one microbatch."""

    hidden: int
    heads: int
    sequence: int
    micro_batch: int = 1
    kv_heads: int = 0
    """0: as many as ``heads``."""
    ffn: int = 0
    """0: four times ``hidden``."""
    gated: bool = False
    tensor: int = 1
    context: int = 1
    expert: int = 1
    world: int = 0
    """0: the smallest world that holds the layout."""
    sequence_parallel: bool = False
    num_experts: int = 0
    topk: int = 2
    recompute: str = "none"
    """``none``, ``selective`` (core attention) or ``full``."""
    dtype: str = "bfloat16"

    @property
    def num_ranks(self) -> int:
        """Ranks of the world the layer is traced in."""
        return self.world or self.tensor * self.context * self.expert


def read_layer_request(values: Mapping[str, Any]) -> LayerRequest:
    """A request from plain data; raises ``ConfigError`` with the key, the value and the rule."""
    known = {item.name: item.type for item in fields(LayerRequest)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown keys {unknown}; known: {sorted(known)}.")
    try:
        request = LayerRequest(**values)
    except TypeError as error:
        raise ConfigError(f"the layer to trace is incomplete: {error}.") from error
    for name in ("hidden", "heads", "sequence", "micro_batch", "tensor", "context", "expert"):
        value = getattr(request, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}, must be a whole number of at least 1.")
    if request.heads % request.tensor or (request.ffn or 4 * request.hidden) % request.tensor:
        raise ConfigError(f"heads {request.heads} and ffn must be divisible by tensor {request.tensor}.")
    if request.hidden % request.heads:
        raise ConfigError(f"hidden {request.hidden} is not divisible by heads {request.heads}.")
    if request.context > 1 and request.sequence % (2 * request.context):
        raise ConfigError(f"sequence {request.sequence} is not divisible by 2 x context {request.context}.")
    if request.sequence_parallel and (request.sequence // request.context) % request.tensor:
        raise ConfigError(
            f"sequence {request.sequence} / context {request.context} is not divisible by {request.tensor}."
        )
    if request.num_ranks % (request.tensor * request.context):
        raise ConfigError(f"world {request.num_ranks} is not divisible by tensor x context.")
    if request.expert > 1 and (not request.num_experts or request.num_experts % request.expert):
        raise ConfigError(f"{request.num_experts} experts cannot be split over expert {request.expert}.")
    if request.recompute not in ("none", "selective", "full"):
        raise ConfigError(f"recompute is {request.recompute!r}, must be none, selective or full.")
    if request.dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"dtype is {request.dtype!r}, must be bfloat16, float16 or float32.")
    return request
