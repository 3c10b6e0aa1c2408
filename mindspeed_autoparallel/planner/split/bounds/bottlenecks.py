"""Branching on the pipeline's bottleneck: it is below a threshold, or it is not.

Many critical paths pass every stage once in each direction and some stages more often. So a step takes at least the
work of all stages plus the largest *extra* of any stage. No single cut implies this, nor does a mean of cuts. If some
stage's extra is at least a given value, then all stages' work plus that value is a valid cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy

from mindspeed_autoparallel.planner.split.bounds.paths import Paths
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array


def bottleneck(cuts: Iterable[Cut], times: Sequence[tuple[Array, Array]], floor: int) -> tuple[int, list[Array]] | None:
    """Return the median of the extras, and the extra of every choice of each stage; ``None`` if nothing can be divided.

    ``times``: by stage, forward and backward times of its choices. ``floor``: a lower bound of the largest extra.
    """
    passing = [cut for cut in cuts if min(cut.forwards) >= 1 and min(cut.backwards) >= 1]
    if not passing:
        return None
    more: Array = numpy.array([(cut.forwards, cut.backwards) for cut in passing], dtype=numpy.int64) - 1
    constant: Array = numpy.array([cut.constant for cut in passing], dtype=numpy.int64)
    extras: list[Array] = []
    for stage, (forward, backward) in enumerate(times):
        passes = numpy.unique(numpy.stack([*more[:, :, stage].T, constant]), axis=1)
        extras.append((forward[:, None] * passes[0] + backward[:, None] * passes[1] + passes[2]).max(axis=1))
    # Under any choice, a stage has at least its smallest extra.
    floor = max(floor, *(int(extra.min()) for extra in extras))
    values = numpy.unique(numpy.concatenate(extras))
    values = values[values > floor]
    return (int(values[len(values) // 2]), extras) if len(values) else None


def halves(paths: Paths) -> tuple[Paths, Paths] | None:
    """Return the paths whose largest extra is below a threshold, and the others; ``None`` if nothing can be divided.

    The threshold is a valid cut for the second half only, so each half has its own cuts and means.
    """
    num = len(paths.ranges)
    found = bottleneck(paths.cuts, [(ranges.forward, ranges.backward) for ranges in paths.ranges], paths.floor)
    if found is None:
        return None
    middle, extras = found
    below, above = paths.copy(), paths.copy()
    for half in (below, above):
        half.cuts, half.means = dict(paths.cuts), list(paths.means)
    for ranges, extra in zip(below.ranges, extras, strict=True):
        ranges.keep(extra < middle)
    above.floor = middle
    above.cuts[Cut((1,) * num, (1,) * num, middle)] = None
    return below, above
