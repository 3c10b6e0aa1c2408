"""Extends Megatron's local attention to unequal head sizes (multi-latent attention) and packed sequences."""

from __future__ import annotations

import functools
import inspect
import itertools
from types import ModuleType
from typing import Any

from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits


def let_local_attention_take_two_head_sizes(edits: Edits, module: ModuleType) -> None:
    """Let ``DotProductAttention`` take ``k_channels`` and ``v_channels``, elements per head, as Transformer Engine's
    does.

    Megatron's forward takes all sizes from its tensors except for the width of the output, which the constructor
    computes from ``config.kv_channels``.
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
            # Key and value are slices of one projection, and the forward views them in other shapes.
            key, value = key.contiguous(), value.contiguous()
        return forward(self, query, key, value, *args, **kwargs)

    edits.set(attention, "__init__", initialize)
    edits.set(attention, "forward", contiguous_forward)


def let_local_attention_take_packed_sequences(edits: Edits, module: ModuleType) -> None:
    """Let ``DotProductAttention`` take ``PackedSeqParams`` (``thd``), as Transformer Engine's does: ``query [t, n, d]``
    -> ``[t, 1, n * d]``, one sequence after another, each by Megatron's own forward."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    attention: Any = module.DotProductAttention
    forward = attention.forward
    causal_kinds = {AttnMaskType.causal, getattr(AttnMaskType, "padding_causal", AttnMaskType.causal)}

    @functools.wraps(forward)
    def packed_forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        packed: Any = kwargs.get("packed_seq_params")
        if getattr(packed, "qkv_format", None) != "thd":
            return forward(self, query, key, value, *args, **kwargs)
        padded = getattr(packed, "cu_seqlens_q_padded", None)
        boundaries = (packed.cu_seqlens_q if padded is None else padded).tolist()
        kind = kwargs.get("attn_mask_type") or self.attn_mask_type
        parts = []
        for start, stop in itertools.pairwise([*boundaries, query.shape[0]]):
            # The last boundary may repeat; rows after it are padding.
            if stop > start:
                rows = (tensor[start:stop].unsqueeze(1).contiguous() for tensor in (query, key, value))
                length = stop - start
                mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).triu(1)
                parts.append(forward(self, *rows, mask if kind in causal_kinds else None))
        return torch.cat(parts)

    edits.set(attention, "forward", packed_forward)
