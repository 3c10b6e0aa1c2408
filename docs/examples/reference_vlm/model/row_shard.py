"""An encoder's rows over its context- and tensor-parallel groups: contiguous runs, gathered if all are needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from mindspeed_autoparallel.runtime.attention.context_parallel import gather_rows
from mindspeed_autoparallel.runtime.attention.shards import contiguous_range


@dataclass(frozen=True)
class RowShard:
    """``sizes``: rows of every context rank, in order; one entry without context parallelism. They cover ``num_rows``
    rows and, if those are too few for every rank to have some, stand-in rows of zeros that ``gather`` drops."""

    num_rows: int
    sizes: tuple[int, ...]
    rank: int = 0
    group: Any = None

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def stop(self) -> int:
        return self.start + self.sizes[self.rank]

    def with_stand_ins(self, boundaries: list[int]) -> list[int]:
        """Return ``boundaries`` of the rows, and one more after the stand-in rows: they attend to themselves."""
        total = sum(self.sizes)
        return boundaries if total == self.num_rows else [*boundaries, total]

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's run of ``rows [num_rows, ...]``."""
        if self.sizes == (self.num_rows,):
            return rows
        missing = sum(self.sizes) - self.num_rows
        return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:]))))[self.start : self.stop]

    def gather(self, rows: torch.Tensor, *, same_use: bool = False) -> torch.Tensor:
        """Return all rows from every rank's own. ``same_use``: every rank computes the same from them, so that each has
        their whole gradient; otherwise the ranks' gradients are summed."""
        return self.gather_with_stand_ins(rows, same_use=same_use)[: self.num_rows]

    def gather_with_stand_ins(self, rows: torch.Tensor, *, same_use: bool = False) -> torch.Tensor:
        """Gather like ``gather``, up to the last of ``with_stand_ins``'s boundaries."""
        if len(self.sizes) == 1:
            return rows
        return gather_rows(rows, self.sizes, self.group, sum_backward=not same_use)

    def merged(self, multiple: int) -> RowShard:
        """Return the shard after every ``multiple`` rows have been merged to one."""
        sizes = tuple(size // multiple for size in self.sizes)
        return RowShard(self.num_rows // multiple, sizes, self.rank, self.group)


def shard_rows(num_rows: int, context_size: int, multiple: int = 1) -> RowShard:
    """Return runs of ``num_rows`` over the current context-parallel group, each of whole groups of ``multiple``
    rows."""
    num_groups = -(-num_rows // multiple)
    if context_size == 1:
        return RowShard(num_rows, (num_groups * multiple,))
    # Megatron's layers cannot take zero rows.
    num_groups = max(num_groups, context_size)
    runs = [contiguous_range(num_groups, context_size, rank) for rank in range(context_size)]
    return RowShard(
        num_rows,
        tuple((stop - start) * multiple for start, stop in runs),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_context_parallel_group(),
    )


def shard_multiple(config: Any, merged: int = 1) -> int:
    """Return the number that a rank's rows must be a multiple of: ``merged``, under sequence parallelism its least
    common multiple with the tensor-parallel size."""
    return math.lcm(merged, config.tensor_model_parallel_size) if config.sequence_parallel else merged


def to_tensor_ranks(rows: torch.Tensor, config: Any) -> torch.Tensor:
    """Return this tensor rank's run of ``rows``, which all tensor ranks hold, under sequence parallelism; else
    ``rows``."""
    if not config.sequence_parallel:
        return rows
    own: torch.Tensor = tensor_parallel.scatter_to_sequence_parallel_region(rows)
    return own


def from_tensor_ranks(rows: torch.Tensor, config: Any) -> torch.Tensor:
    """Return the rows of all tensor ranks, which then all compute the same from them; ``rows`` without sequence
    parallelism."""
    if not config.sequence_parallel:
        return rows
    whole: torch.Tensor = tensor_parallel.gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False)
    return whole


def own_shape(shard: RowShard, config: Any) -> tuple[int, int, int]:
    """Return the shape of the rows that this context (and, under sequence parallelism, tensor) rank hands on."""
    rows = shard.sizes[shard.rank]
    return rows // config.tensor_model_parallel_size if config.sequence_parallel else rows, 1, config.hidden_size
