"""The time of a module as a function of a sample's rows, fitted to what was measured at several lengths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy

from mindspeed_autoparallel.data.work import ModuleWork
from mindspeed_autoparallel.planner.spread.draws import Array

_MIN_SPREAD = 1.2
"""Least ratio of the longest to the shortest length: differences between closer ones are noise."""


def measured_work(
    name: str, rows: str, points: Sequence[tuple[float, float]], share: float, per_row: float
) -> ModuleWork | None:
    """Return the non-negative work that fits ``points`` (rows of a sample, time) with the least relative error.

    For text the squares are a part of their own. For pictures and sounds only the rows of a microbatch are known, not
    those of each item: attention has the ``share`` of its operations, with ``per_row`` rows of one picture for a row.
    ``None`` if the lengths are too close to one another.
    """
    found = numpy.array(points, dtype=numpy.float64).reshape(-1, 2)
    found = found[found[:, 1] > 0]
    if len(found) < 3 or found[:, 0].max() < _MIN_SPREAD * found[:, 0].min():
        return None
    count, times = found[:, 0], found[:, 1]
    if rows == "tokens":
        columns = numpy.stack((numpy.ones(len(found)), count, count**2), axis=1)
        fixed, linear, quadratic = _not_negative_fit(columns / times[:, None]).tolist()
    else:
        columns = numpy.stack((numpy.ones(len(found)), count * (1 + share * per_row)), axis=1)
        fixed, linear = _not_negative_fit(columns / times[:, None]).tolist()
        quadratic = share * linear
    if fixed + linear + quadratic <= 0:
        return None
    return ModuleWork(name=name, rows=rows, linear=linear, quadratic=quadratic, fixed=fixed)


def _not_negative_fit(columns: Array) -> Array:
    """Return the non-negative weights of ``columns [point, part]`` whose sums are nearest to 1 at every point.

    There are few parts, so every set of them is tried.
    """
    number = columns.shape[1]
    best: Array = numpy.zeros(number)
    least = float(len(columns))
    scale = numpy.abs(columns).max(axis=0)
    for size in range(1, number + 1):
        for chosen in itertools.combinations(range(number), size):
            parts = columns[:, chosen] / scale[list(chosen)]
            weights = numpy.linalg.lstsq(parts, numpy.ones(len(columns)), rcond=None)[0]
            error = float(((parts @ weights - 1) ** 2).sum())
            if (weights >= 0).all() and error < least * (1 - 1e-9):
                least, best = error, numpy.zeros(number)
                best[list(chosen)] = weights / scale[list(chosen)]
    return best
