"""Dropout that is the same under every layout: a hash of an element's identity decides whether it is dropped.

An element is identified by its row (a token of a sample, a patch of an image: ``row_keys``), its column or pair of rows
and head, and its place in the model. No generator is used, so there is no state to save: a resumed run continues
bit-exactly, a second forward drops the same elements, and tensor, context, sequence and pipeline ranks agree on every
element that they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.attention.context_parallel import ContextParallelAttention, gather_rows
from mindspeed_autoparallel.runtime.attention.shards import zigzag_positions
from reference_vlm.configuration.data import ITEMS_PER_SAMPLE

ROWS_PER_ITEM = 2**20
"""Most rows of one sample or item: rows are numbered inside it."""
_ATTENTION_OUTPUT, _MLP_OUTPUT, _PROBABILITIES, _EMBEDDINGS = range(4)
_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Constants of splitmix64's finalizer, as signed 64-bit integers."""
_GOLDEN = -0x61C8864680B583EB
_STEPS = 2**24


@dataclass(frozen=True, kw_only=True)
class DropoutRates:
    """Dropout rates, and the number that distinguishes the modules of a training."""

    hidden: float
    attention: float
    seed: int
    module: int

    def site(self, layer: int, place: int) -> int:
        """Return a number for the place in the model; ``layer`` is counted over the whole module."""
        return (self.seed * 16 + self.module) * 2**20 + layer * 4 + place


def item_rows(keys: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return ``[sum(sizes), 1]`` row keys of items with ``keys [items]`` and ``sizes [items]`` rows each."""
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    rows = torch.arange(int(sizes.sum()), device=keys.device) - starts
    return (torch.repeat_interleave(keys, sizes) * ROWS_PER_ITEM + rows).unsqueeze(1)


def token_rows(sample_numbers: torch.Tensor, length: int, boundaries: Sequence[int] | None = None) -> torch.Tensor:
    """Return ``[length, b]`` row keys of whole sequences; ``sample_numbers [b]``.

    With ``boundaries`` ``[length, 1]`` of a packed row: each text has the keys that it has alone; padding at its end
    has keys that no sample has.
    """
    if boundaries is not None:
        sizes = torch.tensor(boundaries, device=sample_numbers.device).diff()
        padding = sample_numbers.new_full((len(sizes) - len(sample_numbers),), -1)
        return item_rows(torch.cat((sample_numbers, padding)) * ITEMS_PER_SAMPLE, sizes)
    positions = torch.arange(length, device=sample_numbers.device)
    return positions[:, None] + sample_numbers[None, :] * (ITEMS_PER_SAMPLE * ROWS_PER_ITEM)


def drop(values: torch.Tensor, rate: float, identity: torch.Tensor) -> torch.Tensor:
    """Return ``values`` with a share ``rate`` set to 0 and the rest scaled; ``identity``: int64 of the same shape."""
    kept = (_mixed(identity) & (_STEPS - 1)) >= round(rate * _STEPS)
    return values * kept.to(values.dtype) / (1.0 - rate)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Mix the bits of int64 numbers (splitmix64); arithmetic wraps."""
    values = values * _GOLDEN
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        values = (values ^ _shifted(values, shift)) * multiplier
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _at(row_keys: torch.Tensor, site: int) -> torch.Tensor:
    return _mixed(_mixed(row_keys) + site)


def drop_hidden(values: torch.Tensor, rates: DropoutRates, site: int, row_keys: torch.Tensor | None) -> torch.Tensor:
    """Drop elements of ``values [s, b, h]``; ``row_keys [s, b]``, or those of all tensor ranks' rows under sequence
    parallelism. Without keys (a layer run by itself) torch's generator decides."""
    if row_keys is None:
        return torch.nn.functional.dropout(values, rates.hidden)
    rows = values.shape[0]
    if row_keys.shape[0] != rows:
        start = parallel_state.get_tensor_model_parallel_rank() * rows
        row_keys = row_keys[start : start + rows]
    columns = torch.arange(1, values.shape[2] + 1, device=values.device)
    return drop(values, rates.hidden, _at(row_keys, site)[:, :, None] + _mixed(columns))


def drop_embeddings(values: torch.Tensor, rates: DropoutRates | None, row_keys: torch.Tensor | None) -> torch.Tensor:
    """Drop elements of the text's embeddings ``[s, b, h]``, as Megatron's embedding does."""
    if rates is None or not rates.hidden:
        return values
    return drop_hidden(values, rates, rates.site(0, _EMBEDDINGS), row_keys)


def attend_with_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None,
    rates: DropoutRates,
    layer: int,
    row_keys: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return attention with dropped probabilities. ``query [b, n, q, d]``, ``key``, ``value [b, n, k, d]`` of this
    tensor rank's heads, ``row_keys``: of queries ``[q, b]`` and keys ``[k, b]``; True in ``mask`` = attend. Memory
    grows with q x k."""
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    probabilities = torch.softmax(scores, dim=-1).to(value.dtype)
    first = parallel_state.get_tensor_model_parallel_rank() * query.shape[1]
    heads = torch.arange(first + 1, first + query.shape[1] + 1, device=query.device)
    of_query = _at(row_keys[0], rates.site(layer, _PROBABILITIES)).t()[:, None, :, None]
    of_key = _mixed(row_keys[1]).t()[:, None, None, :]
    identity = of_query + 3 * of_key + _mixed(heads)[None, :, None, None]
    return torch.matmul(drop(probabilities, rates.attention, identity), value)


class ReproducibleLayer(TransformerLayer):  # type: ignore[misc]  # megatron is untyped
    """Megatron's layer; ``attention_mask`` carries ``row_keys``, which its causal or full attention does not need.

    This way they also reach a recomputed layer, whose microbatch is no longer the latest one.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.rates: DropoutRates | None = getattr(config, "reproducible_dropout", None)
        self._row_keys: torch.Tensor | None = None
        if self.rates is not None and self.rates.hidden:
            self.self_attn_bda = lambda training, fused: self._added(training, _ATTENTION_OUTPUT)
            self.mlp_bda = lambda training, fused: self._added(training, _MLP_OUTPUT)

    def forward(self, hidden_states: Any, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._row_keys = attention_mask
        return super().forward(hidden_states, attention_mask, *args, **kwargs)

    def _added(self, training: bool, place: int) -> Any:
        """Return Megatron's bias-dropout-add."""

        def add(output_with_bias: Any, residual: torch.Tensor, unused: float) -> torch.Tensor:
            output, bias = output_with_bias
            if bias is not None:
                output = output + bias
            if training and self.rates is not None:
                site = self.rates.site(self.layer_number, place)
                output = drop_hidden(output, self.rates, site, self._row_keys)
            return residual + output

        return add


def attention_rates(config: Any, training: bool) -> DropoutRates | None:
    """Return the rates if attention dropout is active now."""
    rates: DropoutRates | None = getattr(config, "reproducible_dropout", None)
    return rates if training and rates is not None and rates.attention else None


class DroppingContextAttention(ContextParallelAttention):
    """Context-parallel attention whose ``attention_mask`` carries the row keys of the own tokens ``[s_local, b]``."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.layer_number = layer_number
        self._row_keys: torch.Tensor | None = None

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._row_keys = attention_mask
        output: torch.Tensor = super().forward(query, key, value, None, *args, **kwargs)
        return output

    def _holders(self, packed: Any, causal: bool, size: int) -> tuple[list[int], list[list[int]]]:
        # The row is split like any other row of text, regardless of the ends of its texts.
        boundaries = packed.boundaries
        return boundaries, [zigzag_positions(boundaries[-1], size, rank) for rank in range(size)]

    def _attend(self, query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        rates = attention_rates(self.config, self.training)
        if rates is None or self._row_keys is None:
            return super()._attend(query, key, value, mask)
        if self.exchanges_heads:
            raise ConfigError("attention dropout cannot be combined with --cp-comm-type a2a here: choose allgather.")
        sizes = [query.shape[2]] * (key.shape[2] // query.shape[2])
        repeat = query.shape[1] // key.shape[1]
        return attend_with_dropout(
            query,
            key.repeat_interleave(repeat, dim=1),
            value.repeat_interleave(repeat, dim=1),
            scale=self.scale,
            mask=mask,
            rates=rates,
            layer=self.layer_number,
            row_keys=(self._row_keys, gather_rows(self._row_keys, sizes, self.group)),
        )
