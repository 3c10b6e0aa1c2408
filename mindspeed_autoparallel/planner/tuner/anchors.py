"""Choice of the layouts to measure whole: different shardings first, then extreme micro batch sizes, then
the middle."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from mindspeed_autoparallel.planner.tuner.corrections import distance
from mindspeed_autoparallel.profiles import MeasuredAt

MAX_ANCHORS = 8


def choose(able: Iterable[MeasuredAt], most: int = MAX_ANCHORS) -> list[MeasuredAt]:
    """Return at most ``most`` of the layouts that fit on the devices."""
    by_sharding: dict[MeasuredAt, list[MeasuredAt]] = {}
    for point in able:
        by_sharding.setdefault(replace(point, micro_batch_size=1), []).append(point)
    order = _spread(list(by_sharding))
    ends, middles = [], []
    for sharding in order:
        points = sorted(by_sharding[sharding], key=lambda point: point.micro_batch_size)
        ends += [points[0], points[-1]]
        center = math.sqrt(points[0].micro_batch_size * points[-1].micro_batch_size)
        middles.append(min(points, key=lambda point: abs(math.log(point.micro_batch_size / center))))
    return list(dict.fromkeys(ends + middles))[:most]


def _spread(shardings: list[MeasuredAt]) -> list[MeasuredAt]:
    """Return the least sharded layout first, then always the one farthest from those before it."""
    left = sorted(shardings, key=lambda point: (distance(point, MeasuredAt()), point.label()))
    order = left[:1]
    while len(order) < len(shardings):
        rest = [point for point in left if point not in order]
        order.append(max(rest, key=lambda point: min(distance(point, chosen) for chosen in order)))
    return order
