"""Two cases of one search: the pipeline's bottleneck is below a middle value, or it is not.

Many critical paths pass every stage once in each direction and some stages more often. So a step takes at least all
stages' work, and on top the largest *extra* of any stage. No single cut implies this, nor does a mean of cuts: where
some stage's extra reaches a value for sure, the work of all stages with that value is a cut of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy

from mindspeed_autoparallel.planner.split.bounds.paths import Paths
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array


def bottleneck(cuts: Iterable[Cut], times: Sequence[tuple[Array, Array]], floor: int) -> tuple[int, list[Array]] | None:
    """Return a middle value, and the extra of every choice of each stage; ``None``: all are alike.

    ``times``: by stage, forward and backward times of its choices. ``floor``: some stage's extra is no less.
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
    # Some stage has at least its least extra, whatever is chosen.
    floor = max(floor, *(int(extra.min()) for extra in extras))
    values = numpy.unique(numpy.concatenate(extras))
    values = values[values > floor]
    return (int(values[len(values) // 2]), extras) if len(values) else None


def halves(paths: Paths) -> tuple[Paths, Paths] | None:
    """Return paths whose largest extra is below a middle value, and those where it is not; ``None``: all are alike.

    The latter have that value as a cut, which holds for them alone: cuts and means of both are their own.
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
