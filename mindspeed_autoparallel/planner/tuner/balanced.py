"""Splits of layers of several kinds that are even in time or in memory; equal layer counts are neither.

Bisection finds the split with the smallest largest stage: for each limit, every stage in turn takes as many layers as
the limit allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from mindspeed_autoparallel.cost.memory import state_bytes
from mindspeed_autoparallel.planner.tuner.candidates import Configuration
from mindspeed_autoparallel.profiles import BlockCost

_PRECISION = 1e-4
"""Relative precision of the largest stage; a finer one has no effect on whole layers."""


def balanced_splits(configuration: Configuration) -> list[tuple[int, ...]]:
    """Return the number of layers by virtual stage for each split: first the one with the shortest slowest stage, then
    those with the emptiest fullest rank, without and with recompute.

    Empty if all layers are alike: equal counts then balance everything.
    """
    (module,) = configuration.candidate.measurement.modules.values()
    layout = configuration.layout
    if not module.kinds or layout.num_virtual_stages == 1:
        return []
    num = layout.num_virtual_stages
    in_flight = [min(num - stage, configuration.candidate.num_microbatches) for stage in range(num)]

    def time_us(block: BlockCost, stage: int) -> float:
        return block.forward_us + block.backward_us

    def memory_bytes(way: str) -> Callable[[BlockCost, int], float]:
        def held(block: BlockCost, stage: int) -> float:
            state = state_bytes(block, layout)
            return state + in_flight[stage] * block.recompute.get(way, block.recompute["none"]).saved_bytes

        return held

    # With several chunks per rank a stage's memory is not that of the rank.
    measures = [time_us, *(memory_bytes(way) for way in ("none", "full") if layout.virtual_size == 1)]
    found = []
    for size_of in measures:
        by_kind = [[size_of(kind, stage) for kind in module.kinds] for stage in range(num)]
        sizes = [[row[kind] for kind in module.pattern] for row in by_kind]
        ends = [size_of(block, stage) if block else 0.0 for block, stage in ((module.pre, 0), (module.post, num - 1))]
        found.append(_smallest_largest(sizes, ends))
    return found


def _smallest_largest(sizes: Sequence[Sequence[float]], ends: Sequence[float]) -> tuple[int, ...]:
    """Return the split whose largest stage is smallest.

    ``sizes``: of every layer on each stage; ``ends``: additional sizes of the first and the last stage.
    """
    before = [[0.0, *itertools.accumulate(row)] for row in sizes]
    low, high = 0.0, max(row[-1] for row in before) + sum(ends)
    best = _within(before, ends, high)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        found = _within(before, ends, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    assert best is not None  # the first limit lets the first stage hold all layers, less one for each later stage
    return best


def _within(before: Sequence[Sequence[float]], ends: Sequence[float], limit: float) -> tuple[int, ...] | None:
    """Return the layers by stage: as many as ``limit`` allows, leaving one for each later stage; ``None``:
    not all fit."""
    num, total = len(before), len(before[0]) - 1
    done, counts = 0, []
    for stage, row in enumerate(before):
        room = limit - (ends[0] if stage == 0 else 0) - (ends[1] if stage == num - 1 else 0)
        end = done
        while end < total - (num - 1 - stage) and row[end + 1] - row[done] <= room:
            end += 1
        if end == done:
            return None
        counts.append(end - done)
        done = end
    return tuple(counts) if done == total else None
