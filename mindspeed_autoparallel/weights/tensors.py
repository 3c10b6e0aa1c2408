"""The arithmetic of the table of names: interleave queries, keys and values; cut and join for tensor parallelism.

Every function is followed by its inverse and moves values without changing them: a round trip is bit-exact.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights import memory, names

Tensor = Any
_LOG = logging.getLogger(__name__)
MAX_PADDING_ROWS = 8192
"""Most padding rows of a vocabulary: 128, Megatron's default multiple, for each of 64 tensor ranks."""


def canonical_shape(rule: names.Rule) -> tuple[int, ...]:
    """Return the shape of the whole Megatron tensor, of one expert if it is per expert."""
    first = rule.shapes[0]
    if rule.combine in (names.TRANSPOSE, names.TRANSPOSE_PAIRS):
        return first[::-1]
    rows = sum(shape[0] for shape in rule.shapes)
    if rule.combine == names.QKV_WITHOUT_KEY:
        rows += rule.shapes[1][0]
    return (rows, *first[1:])


def check_shape(rule: names.Rule, blocks: Sequence[Tensor], where: object) -> list[Tensor]:
    """Return a canonical tensor's ``blocks`` in the shape of config.json: padding rows of a vocabulary are cut off with
    a warning.

    Raises ``ConfigError`` that names the tensor and both shapes for every other difference.
    """
    wanted = canonical_shape(rule)
    found = shape_of(blocks)
    if found == wanted:
        return list(blocks)
    num_padding = found[0] - wanted[0] if len(found) == len(wanted) and found[1:] == wanted[1:] else -1
    if rule.split == names.VOCABULARY and 0 < num_padding <= MAX_PADDING_ROWS:
        _LOG.warning("%s: %d padding rows beyond the vocabulary of %d left out.", rule.target, num_padding, wanted[0])
        return rows(blocks, 0, wanted[0])
    raise ConfigError(
        f"{where}: {rule.target} has the shape {list(found)}; config.json implies {list(wanted)}. "
        "The checkpoint and config.json belong to different models."
    )


def whole(blocks: Sequence[Tensor]) -> Tensor:
    """Return one tensor with the concatenated rows of ``blocks``."""
    return blocks[0] if len(blocks) == 1 else memory.joined(blocks)


def shape_of(blocks: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape of ``whole(blocks)``."""
    first = tuple(blocks[0].shape)
    return first if len(blocks) == 1 else (sum(len(block) for block in blocks), *first[1:])


def rows(blocks: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
    """Return rows ``begin`` to ``end`` of ``whole(blocks)``, as views."""
    found, at = [], 0
    for block in blocks:
        first, last = max(begin - at, 0), min(end - at, len(block))
        if first < last:
            found.append(block[first:last])
        at += len(block)
    return found or [blocks[0][:0]]


def combine(rule: names.Rule, parts: Sequence[Tensor]) -> list[Tensor]:
    """Combine Hugging Face tensors, in the order of ``rule.sources``, to the blocks of rows of the canonical one.

    See the kinds in ``names``. Blocks are views unless values change, so that nothing is copied before it is written.
    """
    return _ordered(rule, alike(parts))


def alike(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return ``parts`` in a common type that holds all values."""
    import torch

    kind = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    return [part.to(kind) for part in parts]


def _ordered(rule: names.Rule, parts: Sequence[Tensor]) -> list[Tensor]:
    import torch

    first = parts[0]
    if rule.combine in (names.COPY, names.JOIN):
        return list(parts)
    if rule.combine == names.TRANSPOSE:
        return [first.t()]
    if rule.combine == names.PAIRS:
        return [first[0::2], first[1::2]]
    if rule.combine == names.TRANSPOSE_PAIRS:
        return [first.t()[0::2], first.t()[1::2]]
    if rule.combine == names.MINUS_ONE:
        return [_shifted(first, -1.0)]
    if rule.combine == names.DELTA:
        return [head for part in _by_head(rule, parts) for head in part]
    if rule.combine == names.FUSED_QKV:
        parts = first.chunk(3)
    elif rule.combine == names.QKV_WITHOUT_KEY:
        parts = (first, torch.zeros_like(parts[1]), parts[1])
    elif rule.combine == names.GATED_QKV:
        parts = (_gates_behind(rule, first), *parts[1:])
    groups = [part.reshape(rule.groups, -1, *part.shape[1:]) for part in parts]
    return [part for group in zip(*groups, strict=True) for part in group]


def separate(rule: names.Rule, blocks: Sequence[Tensor], dtype: Any = None) -> list[list[Tensor]]:
    """Return the inverse of ``combine``: blocks of the tensors of ``rule.sources``, in their order.

    ``dtype``: of the original; a norm that was stored in a wider type is converted back to it if no value changes.
    """
    if rule.combine == names.COPY:
        return [list(blocks)]
    counts = [shape[0] for shape in rule.shapes]
    if rule.combine == names.JOIN:
        return _split(blocks, counts)
    if rule.combine in (names.TRANSPOSE, names.PAIRS, names.TRANSPOSE_PAIRS, names.MINUS_ONE, names.DELTA):
        return [[tensor] for tensor in _separated(rule, whole(blocks), dtype)]
    if rule.combine == names.FUSED_QKV:
        counts = [counts[0] // 3] * 3
    elif rule.combine == names.QKV_WITHOUT_KEY:
        counts = [counts[0], counts[1], counts[1]]
    groups = _split(blocks, [count // rule.groups for count in counts] * rule.groups)
    query, key, value = ([block for group in groups[first::3] for block in group] for first in range(3))
    if rule.combine == names.FUSED_QKV:
        return [[*query, *key, *value]]
    if rule.combine == names.GATED_QKV:
        query = [_gates_beside(rule, whole(query))]
    return [query, value] if rule.combine == names.QKV_WITHOUT_KEY else [query, key, value]


def _split(blocks: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    """Return consecutive blocks of ``counts`` rows."""
    return [rows(blocks, end - count, end) for count, end in zip(counts, itertools.accumulate(counts), strict=True)]


def _separated(rule: names.Rule, tensor: Tensor, dtype: Any) -> list[Tensor]:
    if rule.combine == names.TRANSPOSE:
        return [tensor.t()]
    if rule.combine == names.MINUS_ONE:
        return [_shifted(tensor, 1.0, dtype)]
    if rule.combine == names.DELTA:
        parts = [part.reshape(rule.groups, -1, *tensor.shape[1:]) for part in tensor.split(rule.sections)]
        joint = (memory.joined(parts[:4], dim=1), memory.joined(parts[4:], dim=1))
        return [part.reshape(-1, *tensor.shape[1:]) for part in joint]
    paired = memory.empty(tensor.shape, tensor.dtype)
    paired[0::2], paired[1::2] = tensor.chunk(2)
    return [paired if rule.combine == names.PAIRS else paired.t()]


def _by_head(rule: names.Rule, parts: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the sections of q, k, v, z and b, a, whose rows are ordered by key head."""
    sections = [count // rule.groups for count in rule.sections]
    for part, rows in zip(parts, (sections[:4], sections[4:]), strict=True):
        yield from part.reshape(rule.groups, -1, *part.shape[1:]).split(rows, dim=1)


def _heads_of(rule: names.Rule, query: Tensor, *order: int) -> Tensor:
    """Return the rows of ``query`` as [query group, two of (head, query or gate), row of the head, ...]."""
    head_size = rule.shapes[1][0] // rule.groups
    num_heads = rule.shapes[0][0] // (2 * head_size * rule.groups)
    sizes = (num_heads, 2)
    return query.reshape(rule.groups, *(sizes[one] for one in order), head_size, *query.shape[1:])


def _gates_behind(rule: names.Rule, query: Tensor) -> Tensor:
    """Order the rows of each query group: all its queries, then all their gates."""
    return _heads_of(rule, query, 0, 1).transpose(1, 2).reshape(query.shape)


def _gates_beside(rule: names.Rule, query: Tensor) -> Tensor:
    return _heads_of(rule, query, 1, 0).transpose(1, 2).reshape(query.shape)


def _shifted(tensor: Tensor, by: float, dtype: Any = None) -> Tensor:
    """Return ``tensor`` plus ``by`` without rounding: in ``dtype`` or its own type if that holds every value, else in
    a wider type."""
    import torch

    exact = tensor.double() + by
    for kind in (dtype or tensor.dtype, tensor.dtype, torch.float32):
        rounded = exact.to(kind)
        if torch.equal(rounded.double(), exact):
            return rounded
    return exact


def cut(rule: names.Rule, blocks: Sequence[Tensor], tensor_size: int, padded_vocab: int) -> list[list[Tensor]]:
    """Cut a canonical tensor, given and returned as blocks of its rows, into the shard of every tensor-parallel rank.

    All are views. The vocabulary is padded with zero rows up to ``padded_vocab`` first.
    """
    shape = shape_of(blocks)
    if rule.split == names.VOCABULARY and padded_vocab > shape[0]:
        blocks = [*blocks, blocks[0].new_zeros(padded_vocab - shape[0], *shape[1:])]
        shape = (padded_vocab, *shape[1:])
    if tensor_size == 1 or rule.split == names.WHOLE:
        return [list(blocks)] * tensor_size
    columns = rule.split == names.COLUMNS
    counts = rule.sections or (shape[1] if columns else shape[0],)
    if any(count % tensor_size for count in counts):
        raise ConfigError(f"{rule.target} of shape {shape} cannot be cut into {tensor_size} parts.")
    if columns:
        return [list(shard) for shard in zip(*(block.chunk(tensor_size, dim=1) for block in blocks), strict=True)]
    parts = _split(blocks, [count // tensor_size for count in counts for _ in range(tensor_size)])
    return [[block for part in parts[rank::tensor_size] for block in part] for rank in range(tensor_size)]


def join(rule: names.Rule, shards: Sequence[Tensor]) -> list[Tensor]:
    """Return the inverse of ``cut``, as blocks of rows; padding rows of a vocabulary remain (``check_shape`` removes
    them)."""
    if rule.split == names.WHOLE or len(shards) == 1:
        return [shards[0]]
    if rule.sections:
        counts = [count // len(shards) for count in rule.sections]
        return [part for section in zip(*(one.split(counts) for one in shards), strict=True) for part in section]
    return [memory.joined(shards, dim=1)] if rule.split == names.COLUMNS else list(shards)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same to the bit: a NaN equals itself."""
    import torch

    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return bool(torch.equal(*flat))
