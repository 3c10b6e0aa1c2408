"""Multi-latent attention without Transformer Engine: Megatron's local attention takes one head size, MLA has two."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits


def let_local_attention_take_two_head_sizes(edits: Edits, module: ModuleType) -> None:
    """Let ``DotProductAttention`` take ``k_channels`` and ``v_channels``, elements per head, as Transformer Engine's
    does.

    Its forward reshapes by the tensors' own sizes except for its result, whose width it computes from
    ``config.kv_channels`` at construction.
    """
    attention: Any = module.DotProductAttention
    construct, forward = attention.__init__, attention.forward
    if "v_channels" in inspect.signature(construct).parameters:
        return

    @functools.wraps(construct)
    def initialize(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        construct(self, *args, **kwargs)
        self.has_latent_heads = v_channels is not None
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    @functools.wraps(forward)
    def contiguous_forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "has_latent_heads", False):
            # Key and value are cut out of one projection, and the forward takes views of them.
            key, value = key.contiguous(), value.contiguous()
        return forward(self, query, key, value, *args, **kwargs)

    edits.set(attention, "__init__", initialize)
    edits.set(attention, "forward", contiguous_forward)
