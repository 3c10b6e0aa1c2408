"""Microbatches that are paired, so that exchanges of one hide behind computing of the other: formula O2."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.cost.placed import PlacedBlock
from mindspeed_autoparallel.spec import Layout


def num_alone(layout: Layout, num_microbatches: int) -> int:
    """Return forwards of a chunk on the first rank, and as many backwards, that no other microbatch runs beside.

    One without stages; with chunks those of the warm-up, which is one longer than without pairs (Megatron's
    ``get_pp_rank_microbatches``).
    """
    if layout.pipeline_size == 1:
        return 1
    ahead = 2 * (layout.pipeline_size - 1) + (layout.virtual_size - 1) * layout.pipeline_size + 1
    return min(ahead, num_microbatches * layout.virtual_size)


def unpaired_us(stages: Sequence[Sequence[PlacedBlock]], layout: Layout, num_microbatches: int) -> float:
    """Return what shows of the exchanges that pairs would hide, on the slowest chunk: no less than the critical path
    shows."""
    return num_alone(layout, num_microbatches) * max(
        sum(block.cost.paired_saving_us for block in held) for held in stages
    )
