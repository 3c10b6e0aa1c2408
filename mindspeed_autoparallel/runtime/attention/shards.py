"""The positions of a sequence on each context-parallel rank (pure Python).

Zigzag is Megatron's balanced slicing: 2*cp chunks, rank r holds chunks r and 2*cp-1-r. Contiguous gives each rank
one run of rows, with sizes that differ by at most one; it fits packed rows of an encoder, which need no causal balance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mindspeed_autoparallel.errors import ConfigError


def zigzag_runs(length: int, context_size: int, rank: int) -> list[tuple[int, int]]:
    """Return the runs ``[start, stop)`` of a sequence that ``rank`` holds, in the order in which it holds them.

    ``ConfigError`` if ``length`` is not a multiple of ``2 * context_size`` under CP > 1.
    """
    if context_size == 1:
        return [(0, length)]
    if length % (2 * context_size):
        raise ConfigError(
            f"a sequence of {length} tokens cannot be split over context parallel {context_size}: the length must be a "
            f"multiple of {2 * context_size}. Pad the sequence or lower cp."
        )
    chunk = length // (2 * context_size)
    return [(held * chunk, (held + 1) * chunk) for held in (rank, 2 * context_size - 1 - rank)]


def zigzag_positions(length: int, context_size: int, rank: int) -> list[int]:
    """Return every position in the runs of ``zigzag_runs``."""
    return [position for run in zigzag_runs(length, context_size, rank) for position in range(*run)]


def contiguous_range(length: int, context_size: int, rank: int) -> tuple[int, int]:
    """Return the run ``[start, stop)`` of ``length`` rows that ``rank`` holds; the first ranks hold the remainder."""
    size, extra = divmod(length, context_size)
    start = rank * size + min(rank, extra)
    return start, start + size + (1 if rank < extra else 0)


def packed_positions(boundaries: Sequence[int], context_size: int, rank: int, *, causal: bool) -> list[int]:
    """Return the rows that ``rank`` holds of a batch of sequences between ``boundaries``: zigzag in each sequence if
    causal or divisible, else one run."""
    sequences = list(itertools.pairwise(boundaries))
    if causal or all((stop - start) % (2 * context_size) == 0 for start, stop in sequences):
        return [start + p for start, stop in sequences for p in zigzag_positions(stop - start, context_size, rank)]
    return list(range(*contiguous_range(boundaries[-1], context_size, rank)))
