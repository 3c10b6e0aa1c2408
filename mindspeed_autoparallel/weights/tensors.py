"""The arithmetic of the table of names: interleave queries, keys and values; cut and join for tensor parallelism.

Every function has its inverse beside it and changes no value, only places: a round trip is exact to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import memory, names
from mindspeed_autoparallel.weights.architecture import Architecture, ModuleShape

Tensor = Any
_LOG = logging.getLogger(__name__)
MAX_PADDING_ROWS = 8192
"""Of a vocabulary: 128, Megatron's default multiple, for each of 64 tensor ranks."""


def canonical_shape(rule: names.Rule, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the shape of the whole Megatron tensor, from those of its sources; None where config.json does not tell
    one."""
    parts = [shapes[source] for source in rule.sources if source in shapes]
    if len(parts) < len(rule.sources):
        return None
    rows = sum(part[0] for part in parts)
    if rule.combine == names.QKV_WITHOUT_KEY:
        rows += parts[1][0]
    return (rows, *parts[0][1:])


def check_shape(rule: names.Rule, tensor: Tensor, architecture: Architecture, where: object) -> Tensor:
    """Return the canonical ``tensor`` as config.json means it: rows that only pad a vocabulary are cut off, and told.

    Raises ``ConfigError`` that names the tensor and both shapes for every other difference.
    """
    wanted = canonical_shape(rule, architecture.shapes)
    found = tuple(tensor.shape)
    if wanted is None or found == wanted:
        return tensor
    num_padding = found[0] - wanted[0] if len(found) == len(wanted) and found[1:] == wanted[1:] else -1
    if rule.split == names.VOCABULARY and 0 < num_padding <= MAX_PADDING_ROWS:
        _LOG.warning("%s: %d padding rows beyond the vocabulary of %d left out.", rule.target, num_padding, wanted[0])
        return tensor[: wanted[0]]
    raise ConfigError(
        f"{where}: {rule.target} has the shape {list(found)}; config.json means {list(wanted)}. "
        "The checkpoint and config.json belong to different models."
    )


def combine(rule: names.Rule, parts: Sequence[Tensor], shape: ModuleShape) -> Tensor:
    """Combine Hugging Face tensors to the canonical one. Rows of ``linear_qkv``: per group queries, key, value.

    ``parts``: in the order of ``rule.sources``. ``ConfigError`` if rows do not match the model description.
    """
    import torch

    if rule.combine == names.COPY:
        return parts[0]
    if rule.combine == names.GATED:
        return memory.joined(parts)
    if rule.combine == names.FUSED_QKV:
        _expect_rows(rule, parts[0], sum(_qkv_rows(shape)))
        parts = parts[0].split(_qkv_rows(shape))
    elif rule.combine == names.QKV_WITHOUT_KEY:
        query, value = parts
        parts = (query, torch.zeros_like(value), value)
    for part, rows in zip(parts, _qkv_rows(shape), strict=True):
        _expect_rows(rule, part, rows)
    groups = [part.reshape(shape.num_query_groups, -1, *part.shape[1:]) for part in parts]
    return memory.joined(groups, dim=1).reshape(-1, *parts[0].shape[1:])


def separate(rule: names.Rule, tensor: Tensor, shape: ModuleShape) -> list[Tensor]:
    """Return inverse of ``combine``: the tensors of ``rule.sources``, in their order."""

    if rule.combine == names.COPY:
        return [tensor]
    if rule.combine == names.GATED:
        return list(tensor.chunk(2))
    _expect_rows(rule, tensor, sum(_qkv_rows(shape)))
    rows_per_group = [rows // shape.num_query_groups for rows in _qkv_rows(shape)]
    grouped = tensor.reshape(shape.num_query_groups, -1, *tensor.shape[1:])
    query, key, value = (part.reshape(-1, *tensor.shape[1:]) for part in grouped.split(rows_per_group, dim=1))
    if rule.combine == names.FUSED_QKV:
        return [memory.joined((query, key, value))]
    return [query, value] if rule.combine == names.QKV_WITHOUT_KEY else [query, key, value]


def cut(rule: names.Rule, tensor: Tensor, tensor_size: int, padded_vocab: int) -> list[Tensor]:
    """Cut a canonical tensor into the shard of every tensor-parallel rank, each with memory of its own.

    The vocabulary is padded with zero rows up to ``padded_vocab`` first.
    """

    if rule.split == names.VOCABULARY and padded_vocab > tensor.shape[0]:
        padding = tensor.new_zeros(padded_vocab - tensor.shape[0], *tensor.shape[1:])
        tensor = memory.joined((tensor, padding))
    if tensor_size == 1 or rule.split == names.WHOLE:
        return [_own(tensor)] * tensor_size
    if rule.split == names.GATED_ROWS:
        gate, up = (half.chunk(tensor_size) for half in tensor.chunk(2))
        return [memory.joined(halves) for halves in zip(gate, up, strict=True)]
    dim = 1 if rule.split == names.COLUMNS else 0
    if tensor.shape[dim] % tensor_size:
        raise ConfigError(f"{rule.target} of shape {tuple(tensor.shape)} cannot be cut into {tensor_size} parts.")
    return [_own(part) for part in tensor.chunk(tensor_size, dim=dim)]


def join(rule: names.Rule, shards: Sequence[Tensor]) -> Tensor:
    """Return inverse of ``cut``; rows that pad a vocabulary stay (``check_shape`` takes them off)."""

    if rule.split == names.WHOLE or len(shards) == 1:
        return shards[0]
    if rule.split == names.GATED_ROWS:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return memory.joined((*gates, *ups))
    return memory.joined(shards, dim=1 if rule.split == names.COLUMNS else 0)


def _own(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without the rest of the memory it is a view of: torch.save would write all of that."""

    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return memory.copied(tensor)


def _qkv_rows(shape: ModuleShape) -> list[int]:
    key_rows = shape.num_query_groups * shape.head_size
    return [shape.num_heads * shape.head_size, key_rows, key_rows]


def _expect_rows(rule: names.Rule, tensor: Tensor, rows: int) -> None:
    if tensor.shape[0] != rows:
        raise ConfigError(
            f"{rule.target}: a part has {tensor.shape[0]} rows where the model description means {rows}. "
            "The weights and config.json belong to different models."
        )
