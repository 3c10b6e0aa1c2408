"""Attention over a context-parallel group on any device: gather keys and values, or exchange rows for heads.

``gather_rows`` gathers shards of any sizes; its backward sums the gradients of all ranks and returns this rank's
shard. The module has the call signature of Megatron's ``DotProductAttention``, so a layer spec can name it as
``core_attention`` (``use_in_spec``). It supports causal and full masks, grouped queries, ``[s, b, n, d]`` batches and
packed ``[t, n, d]`` sequences.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import AttnMaskType

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.attention import shards


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, sizes: tuple[int, ...], group: Any, sum_backward: bool) -> torch.Tensor:
        ctx.sizes, ctx.group, ctx.rank, ctx.sum_backward = sizes, group, torch.distributed.get_rank(group), sum_backward
        longest = max(sizes)
        padded = local.new_zeros((longest, *local.shape[1:]))
        padded[: local.shape[0]] = local
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = grads
        if ctx.sum_backward:
            grad = grad.contiguous().clone()
            torch.distributed.all_reduce(grad, group=ctx.group)
        start = sum(ctx.sizes[: ctx.rank])
        return grad[start : start + ctx.sizes[ctx.rank]].contiguous(), None, None, None


def gather_rows(local: torch.Tensor, sizes: Sequence[int], group: Any, *, sum_backward: bool = True) -> torch.Tensor:
    """Return rows of all ranks of ``group`` in rank order, ``[sum(sizes), ...]``; ``local`` is ``[sizes[rank], ...]``.

    ``sum_backward`` True sums the gradient of the local rows over ranks, for ranks that use the gathered rows in
    different work; False takes the local slice, for ranks that all hold the same full gradient.
    """
    gathered: torch.Tensor = _GatherRows.apply(local, tuple(sizes), group, sum_backward)
    return gathered


def exchange(tensor: torch.Tensor, group: Any, *, to_heads: bool) -> torch.Tensor:
    """Return all rows of this rank's share of the heads, ``[s * size, b, n / size, d]``, rows in rank order.

    ``tensor``: this rank's rows of all heads, ``[s, b, n, d]``. ``to_heads`` False converts back.
    """
    from megatron.core.tensor_parallel.mappings import all_to_all

    size = torch.distributed.get_world_size(group)
    if to_heads:
        parts = tensor.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        exchanged: torch.Tensor = all_to_all(group, parts)
        return exchanged.flatten(0, 1)
    exchanged = all_to_all(group, tensor.unflatten(0, (size, -1)).contiguous())
    return exchanged.permute(1, 2, 0, 3, 4).flatten(2, 3)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None, dropout: float
) -> torch.Tensor:
    """Return softmax attention ``[b, n, q, d]`` of ``query [b, n, q, d]`` and ``key``, ``value`` ``[b, g, k, d]``.

    g must divide n. ``mask``: True where a query attends to a key. ``dropout``: probability.
    """
    if key.shape[1] != query.shape[1]:
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    attended: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale
    )
    return attended


class ContextParallelAttention(torch.nn.Module):
    """Drop-in ``core_attention`` of megatron-core 0.12 to 0.19; output ``[s_local, b, heads_local * d]``."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.attn_mask_type = attn_mask_type
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        self.exchanges_heads = cp_comm_type == "a2a"
        self._positions: dict[Any, Any] = {}

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
        """Return the output ``[s, b, n * d]`` for ``query [s, b, n, d]``; packed: ``[t, n * d]`` for ``[t, n, d]``.

        ``ConfigError`` for an attention bias, and under CP > 1 for a mask that is neither causal nor absent.
        """
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if attention_bias is not None:
            raise ConfigError("context-parallel attention takes no attention bias; use cp 1 for this module.")
        causal = kind in (AttnMaskType.causal, getattr(AttnMaskType, "padding_causal", None))
        size = torch.distributed.get_world_size(self.group)
        if not causal and kind != AttnMaskType.no_mask and attention_mask is not None and size > 1:
            raise ConfigError(f"context-parallel attention supports causal and no_mask, not {kind}; use cp 1.")
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params, causal, size)
        mask = None if causal or kind == AttnMaskType.no_mask or attention_mask is None else ~attention_mask
        by_heads = self.exchanges_heads and size > 1
        local = query.shape[0]
        if by_heads:
            query, key, value = (self._all_rows(t, size) for t in (query, key, value))
        elif size > 1:
            key, value = (gather_rows(t, [local] * size, self.group) for t in (key, value))
        if causal:
            mask = self._causal_mask(local, size, query.device, every_query=by_heads)
        out = self._attend(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), mask)
        out = out.permute(2, 0, 1, 3)
        return (exchange(out, self.group, to_heads=False) if by_heads else out).flatten(-2)

    def _all_rows(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        if tensor.shape[2] % size:
            raise ConfigError(
                f"--cp-comm-type a2a gives each of {size} context ranks as many heads, but a tensor rank has "
                f"{tensor.shape[2]}; choose allgather."
            )
        return exchange(tensor, self.group, to_heads=True)

    def _attend(self, query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        if not (self.training and self.dropout):
            return attend(query, key, value, self.scale, mask, 0.0)
        if self.config.sequence_parallel:
            return attend(query, key, value, self.scale, mask, self.dropout)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return attend(query, key, value, self.scale, mask, self.dropout)

    def _causal_mask(self, local: int, size: int, device: Any, *, every_query: bool = False) -> torch.Tensor:
        signature = (local, size, device, every_query)
        if signature not in self._positions:
            rank = torch.distributed.get_rank(self.group)
            runs = [shards.zigzag_runs(local * size, size, r) for r in range(size)]
            # Created on the query's device (fake in a trace): the mask grows with the square of the sequence length.
            held = [torch.cat([torch.arange(*run, device=device) for run in rank_runs]) for rank_runs in runs]
            queries = torch.cat(held) if every_query else held[rank]
            self._positions = {signature: queries[:, None] >= torch.cat(held)[None, :]}
        mask: torch.Tensor = self._positions[signature]
        return mask

    def _holders(self, packed: Any, causal: bool, size: int) -> tuple[list[int], list[list[int]]]:
        """Return the sequences' boundaries, and the rows that every context rank holds."""
        padded = getattr(packed, "cu_seqlens_q_padded", None)
        boundaries = (packed.cu_seqlens_q if padded is None else padded).tolist()
        return boundaries, [shards.packed_positions(boundaries, size, rank, causal=causal) for rank in range(size)]

    def _packed(self, query: Any, key: Any, value: Any, packed: Any, causal: bool, size: int) -> torch.Tensor:
        """Attend one sequence after another: this rank's queries to all keys of their sequence."""
        squeeze = query.dim() == 4
        if squeeze:
            query, key, value = (t.squeeze(1) for t in (query, key, value))
        boundaries, holders = self._holders(packed, causal, size)
        mine = holders[torch.distributed.get_rank(self.group)]
        if len(mine) != query.shape[0]:
            raise ConfigError(
                f"packed sequences of {boundaries[-1]} rows give this rank {len(mine)} rows, not {query.shape[0]}."
            )
        positions = torch.tensor(mine, device=query.device)
        if size > 1:
            order = torch.argsort(torch.tensor([p for held in holders for p in held], device=query.device))
            counts = [len(held) for held in holders]
            key, value = (gather_rows(t, counts, self.group)[order] for t in (key, value))
        out = torch.zeros_like(query)
        for start, stop in itertools.pairwise(boundaries):
            rows = torch.nonzero((positions >= start) & (positions < stop)).flatten()
            if rows.numel() == 0:
                continue
            keys_at = torch.arange(start, stop, device=query.device)
            mask = positions[rows][:, None] >= keys_at[None, :] if causal else None
            parts = (t.transpose(0, 1).unsqueeze(0) for t in (query[rows], key[start:stop], value[start:stop]))
            out = out.index_copy(
                0,
                rows,
                self._attend(next(parts), next(parts), next(parts), mask).squeeze(0).transpose(0, 1).to(out.dtype),
            )
        if size > 1:
            # A rank whose queries use no gathered key still joins the backward collectives.
            out = out + (0.0 * (key.sum(dtype=torch.float32) + value.sum(dtype=torch.float32))).to(out.dtype)
        flat = out.flatten(-2)
        return flat.unsqueeze(1) if squeeze else flat


def use_in_spec(layer_spec: Any) -> Any:
    """Return a copy of a layer's or a block's spec whose ``core_attention`` is ``ContextParallelAttention``."""
    spec = copy.deepcopy(layer_spec)
    for layer in getattr(spec, "layer_specs", [spec]):
        layer.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    return spec
