"""Which of an item's output rows a first-stage rank keeps: its share of the sequence under SP and CP, or all.

Context parallelism cuts a sequence into ``2 * size`` chunks and gives rank ``c`` chunks ``c`` and ``2 * size - 1 - c``;
sequence parallelism cuts what a context rank holds into equal runs, one per tensor rank. These are Megatron's cuts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.runtime.hetero.redistribution.items import Item, Rows
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import Placement


@dataclass(frozen=True)
class Shard:
    """Rows of one item and the ranks that keep them, each of which has the same gradient for them."""

    ranks: tuple[int, ...]
    rows: tuple[Rows, ...]


@functools.lru_cache(maxsize=4096)
def tokens_held(num_tokens: int, context: int, context_size: int, tensor: int, tensor_size: int) -> tuple[Rows, ...]:
    """Return runs of a sequence that one rank holds; ``tensor_size`` is 1 without sequence parallelism."""
    chunks = [(0, num_tokens)]
    if context_size > 1:
        size = num_tokens // (2 * context_size)
        chunks = [(place * size, (place + 1) * size) for place in (context, 2 * context_size - 1 - context)]
    local = num_tokens // context_size // tensor_size
    first, last = tensor * local, (tensor + 1) * local
    runs, start = [], 0
    for low, high in chunks:
        # This chunk is [start, start + high - low) of what the context rank holds.
        cut = (max(first, start), min(last, start + high - low))
        if cut[0] < cut[1]:
            runs.append((low + cut[0] - start, low + cut[1] - start))
        start += high - low
    return tuple(runs)


def shards_of(item: Item, ranks: Sequence[int], backbone: Placement, sequence_parallel: bool) -> list[Shard]:
    """Return the shards of an item over the first-stage ``ranks`` of its replica; whole items per context rank where
    the place of its tokens is unknown or its sequence cannot be cut evenly."""
    context_size = 1 + max(backbone[rank].context for rank in ranks)
    tensor_size = 1 + max(backbone[rank].tensor for rank in ranks) if sequence_parallel else 1
    even = item.num_tokens % (tensor_size * (2 * context_size if context_size > 1 else 1)) == 0
    placed = item.first_token is not None and even
    kept: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        at = backbone[rank]
        kept.setdefault((at.context, at.tensor if placed and sequence_parallel else 0), []).append(rank)
    shards = []
    for (context, tensor), holders in sorted(kept.items()):
        rows: tuple[Rows, ...] = ((0, item.output_rows),)
        if placed and item.first_token is not None:
            first, stop = item.first_token, item.first_token + item.output_rows
            runs = tokens_held(item.num_tokens, context, context_size, tensor, tensor_size)
            rows = tuple((max(low, first) - first, min(high, stop) - first) for low, high in runs)
        shards.append(Shard(tuple(holders), tuple(run for run in rows if run[0] < run[1])))
    return shards
