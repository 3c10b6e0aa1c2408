"""Core attention of every module: torch's fused attention, causal or full, packed sequences by cumulative lengths.

It works on every device and needs no Transformer Engine. A layer spec names the class as ``core_attention``; another
class with Megatron's call signature can take its place (``layer_spec(core_attention=...)``).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from reference_vlm.model.dropout import attend_with_dropout, attention_rates
from reference_vlm.model.row_shard import RowShard


class PackedRows(PackedSeqParams):
    """Rows that attend to one another: ``boundaries`` of the images or chunks, ``windows`` for windowed layers, both
    of all rows; ``shard``: the rows of which this context rank has queries.

    Its format is not ``thd``, so that Megatron keeps rows ``[rows, 1, heads, size]`` and rotates each row by its own
    angle; only core attention looks at the boundaries.
    """

    def __init__(self, boundaries: list[int], windows: list[int] | None = None, shard: RowShard | None = None) -> None:
        super().__init__(qkv_format="sbhd")
        self.boundaries = boundaries
        self.windows = windows
        self.shard = shard or RowShard(boundaries[-1], (boundaries[-1],))


class PackedAttention(torch.nn.Module):
    """Megatron's ``core_attention``: ``query [s, b, n, d]``, ``key``, ``value [s, b, g, d]`` -> ``[s, b, n * d]``."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.config, self.layer_number = config, layer_number
        self.causal = attn_mask_type in (AttnMaskType.causal, getattr(AttnMaskType, "padding_causal", None))
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.windowed = False
        """Whether the layer attends within windows instead of whole images; set by the code that places the layer."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> torch.Tensor:
        if isinstance(packed_seq_params, PackedRows):
            boundaries = packed_seq_params.boundaries
            if self.windowed and packed_seq_params.windows is not None:
                boundaries = packed_seq_params.windows
            return self._within(boundaries, query, key, value, packed_seq_params.shard, attention_mask)
        return self._attend(query, key, value, attention_mask, attention_mask)

    def _within(
        self,
        boundaries: list[int],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        shard: RowShard,
        row_keys: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return own queries against all keys between the same two boundaries; ``row_keys``: of the own rows."""
        key, value = shard.gather_with_stand_ins(key), shard.gather_with_stand_ins(value)
        drops = row_keys is not None and attention_rates(self.config, self.training) is not None
        all_keys = shard.gather_with_stand_ins(row_keys) if drops and row_keys is not None else None
        first, last = shard.start, shard.stop
        parts = []
        for start, stop in itertools.pairwise(shard.with_stand_ins(boundaries)):
            if start < last and first < stop:
                own = slice(max(start, first) - first, min(stop, last) - first)
                of_queries = row_keys[own] if row_keys is not None else None
                of_keys = all_keys[start:stop] if all_keys is not None else None
                parts.append(self._attend(query[own], key[start:stop], value[start:stop], of_queries, of_keys))
        return torch.cat(parts)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_keys: torch.Tensor | None,
        key_keys: torch.Tensor | None,
    ) -> torch.Tensor:
        repeat = query.shape[2] // key.shape[2]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=2), value.repeat_interleave(repeat, dim=2)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        rates = attention_rates(self.config, self.training)
        if rates is not None and query_keys is not None and key_keys is not None:
            size, device = query.shape[2], query.device
            attended = attend_with_dropout(
                query,
                key,
                value,
                scale=self.scale,
                mask=torch.ones(size, size, dtype=torch.bool, device=device).tril() if self.causal else None,
                rates=rates,
                layer=self.layer_number,
                row_keys=(query_keys, key_keys),
            )
        else:
            attended = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=self.causal, scale=self.scale
            )
        return attended.permute(2, 0, 1, 3).flatten(2)
