"""Coordinates of ranks in a module's layout, and the rows of an item that each rank keeps under SP and CP.

Context parallelism cuts a sequence into ``2 * size`` chunks and gives rank ``c`` chunks ``c`` and ``2 * size - 1 - c``;
sequence parallelism cuts a context rank's rows into equal runs, one per tensor rank. These are Megatron's cuts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

Rows = tuple[int, int]
"""``[start, stop)``"""


@dataclass(frozen=True)
class LocalItem:
    """One image or audio clip of a microbatch, in the order in which the host merges embeddings."""

    sample: int
    input_rows: int
    output_rows: int
    cost: float
    """Relative work in any unit; about ``a n + b n^2`` for n patches that attend to one another."""
    meta: tuple[int, ...] = ()
    """Small integers that ``encode`` needs in addition to the rows, e.g. (frames, height, width) in patches."""
    first_token: int | None = None
    """Start of the output rows in the sample's sequence, if they are contiguous there and the host cuts
    sequences as Megatron does. Under sequence or context parallelism each rank then gets only the rows of its tokens
    (zeros elsewhere); None sends whole items."""
    num_tokens: int = 0
    """Length of the sample's padded sequence, with ``first_token``."""


@dataclass(frozen=True, kw_only=True)
class Item(LocalItem):
    """An item in the form the plan needs, the same on every rank."""

    dp_replica: int
    """Data-parallel replica of the backbone whose microbatch holds the sample."""
    microbatch: int


@dataclass(frozen=True)
class Coordinates:
    """One rank's place in one module's layout."""

    tensor: int
    context: int
    data: int
    pipeline: int


Placement = tuple[Coordinates, ...]


def sized_placement(
    world_size: int, tensor: int, context: int, pipeline: int, *, pipeline_before_data: bool = False
) -> Placement:
    """Return the coordinates of every rank in Megatron's order: tensor varies fastest, then context, data, pipeline.

    ``pipeline_before_data`` swaps the last two, as ``--use-tp-pp-dp-mapping`` does.
    """
    inner = tensor * context
    data = world_size // (inner * pipeline)

    def place(rank: int) -> Coordinates:
        outer = rank // inner
        replica, stage = outer % data, outer // data
        if pipeline_before_data:
            replica, stage = outer // pipeline, outer % pipeline
        return Coordinates(rank % tensor, rank // tensor % context, replica, stage)

    return tuple(place(rank) for rank in range(world_size))


def num_stages(placement: Placement) -> int:
    """Return the pipeline size of a placement."""
    return 1 + max(place.pipeline for place in placement)


def num_replicas(placement: Placement) -> int:
    """Return the data-parallel size of a placement."""
    return 1 + max(place.data for place in placement)


def replica_ranks(placement: Placement, data: int, pipeline: int | None = None) -> list[int]:
    """Return the ranks of one data-parallel replica in rank order, only those of stage ``pipeline`` if given."""
    return [
        rank for rank, at in enumerate(placement) if at.data == data and (pipeline is None or at.pipeline == pipeline)
    ]


def by_replica(placement: Placement, pipeline: int | None = None) -> dict[int, list[int]]:
    """Return ``replica_ranks`` of every replica in one pass over the ranks."""
    found: dict[int, list[int]] = {}
    for rank, at in enumerate(placement):
        if pipeline is None or at.pipeline == pipeline:
            found.setdefault(at.data, []).append(rank)
    return found


def closed_sets(placements: Sequence[Placement]) -> list[list[int]]:
    """Return the smallest disjoint sets of ranks that hold whole replicas of every placement.

    Mode ``local`` exchanges rows only inside one set.
    """
    parent = list(range(len(placements[0])))

    def root(rank: int) -> int:
        while parent[rank] != rank:
            rank = parent[rank]
        return rank

    for placement in placements:
        first: dict[int, int] = {}
        for rank, at in enumerate(placement):
            parent[root(rank)] = root(first.setdefault(at.data, rank))
    sets: dict[int, list[int]] = {}
    for rank in range(len(parent)):
        sets.setdefault(root(rank), []).append(rank)
    return sorted(sets.values())


@dataclass(frozen=True)
class Shard:
    """Rows of one item and the ranks that keep them; all these ranks have the same gradient for the rows."""

    ranks: tuple[int, ...]
    rows: tuple[Rows, ...]


@functools.lru_cache(maxsize=4096)
def tokens_held(num_tokens: int, context: int, context_size: int, tensor: int, tensor_size: int) -> tuple[Rows, ...]:
    """Return the token runs of a sequence that one rank holds; ``tensor_size`` is 1 without sequence parallelism."""
    chunks = [(0, num_tokens)]
    if context_size > 1:
        size = num_tokens // (2 * context_size)
        chunks = [(place * size, (place + 1) * size) for place in (context, 2 * context_size - 1 - context)]
    local = num_tokens // context_size // tensor_size
    first, last = tensor * local, (tensor + 1) * local
    runs, start = [], 0
    for low, high in chunks:
        # This chunk is [start, start + high - low) of the context rank's rows.
        cut = (max(first, start), min(last, start + high - low))
        if cut[0] < cut[1]:
            runs.append((low + cut[0] - start, low + cut[1] - start))
        start += high - low
    return tuple(runs)


def shards_of(item: Item, ranks: Sequence[int], backbone: Placement, sequence_parallel: bool) -> list[Shard]:
    """Return the shards of an item over ``ranks``, one stage of its backbone replica.

    Each context rank keeps the whole item if its position is unknown or its sequence cannot be cut evenly.
    """
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
