"""Distribute items over bins so that the heaviest bin is as light as possible, with a lower bound of its weight.

An item has a weight for every phase; the cost is the sum over phases of the heaviest bin's weight. Balanced
Karmarkar-Karp (largest differencing) and longest-processing-time give two starts, exchanges along the heaviest bins
improve the better one. Michiels, Korst, Aarts, van Leeuwen: Performance ratios for the Karmarkar-Karp differencing
method, 2003; Graham: Bounds on multiprocessing timing anomalies, 1969.

Exchanges come in two kinds: first one in every pair of a heavy and a light bin at once, as long as squares of the loads
fall quickly; then single ones along the heaviest bins.
"""

from __future__ import annotations

import heapq

import numpy

from mindspeed_autoparallel.data.exchanges import exchange_along_heaviest, exchange_in_pairs, loads_of
from mindspeed_autoparallel.data.work import Array
from mindspeed_autoparallel.errors import ConfigError

_EXCHANGES = ((16, 5e-3), (96, 1.8e-2))
"""Most single exchanges, and the relative distance to the lower bound above which they apply."""


def partition(weights: Array, num_bins: int, per_bin: int = 0) -> Array:
    """Return the bin of each item of ``weights [item, phase]``; ``per_bin`` items in every bin, 0: any number.

    Raises ``ConfigError`` if the items cannot fill the bins.
    """
    number = len(weights)
    if num_bins < 1 or number < num_bins or (per_bin and number != num_bins * per_bin):
        raise ConfigError(
            f"{number} items cannot be shared between {num_bins} bins" + f" of {per_bin}." * bool(per_bin)
        )
    weights = numpy.asarray(weights, dtype=numpy.float64)
    bounds = lower_bounds(weights, num_bins, per_bin)
    total = weights.sum(axis=1)
    starts = [_longest_first(total, num_bins, per_bin)]
    if per_bin:
        starts.append(_largest_differences(total, num_bins))
    costs = [cost_of(weights, bins, num_bins) for bins in starts]
    bins = starts[costs.index(min(costs))]
    if num_bins > 1 and min(costs) > float(bounds.sum()) * (1 + _EXCHANGES[0][1]):
        bins = _improved(weights, bins, num_bins, bounds, bool(per_bin))
    return bins


def _improved(weights: Array, bins: Array, num_bins: int, bounds: Array, is_exact: bool) -> Array:
    bound = float(bounds.sum())
    if is_exact:
        bins = exchange_in_pairs(weights, bins, bounds * (1 + _EXCHANGES[0][1]), num_bins)
    for number, near in _EXCHANGES:
        enough = bound * (1 + near)
        if cost_of(weights, bins, num_bins) > enough:
            bins = exchange_along_heaviest(weights, bins, num_bins, enough, is_exact, number)
    return bins


def cost_of(weights: Array, bins: Array, num_bins: int) -> float:
    """Return the sum over phases of the heaviest bin's weight."""
    return float(loads_of(weights, bins, num_bins).max(axis=0).sum())


def lower_bound(weights: Array, num_bins: int, per_bin: int = 0) -> float:
    """Return a lower bound of the cost of any partition of ``weights [item, phase]``."""
    return float(lower_bounds(weights, num_bins, per_bin).sum())


def lower_bounds(weights: Array, num_bins: int, per_bin: int = 0) -> Array:
    """Return ``[phase]``: lower bounds of the heaviest bin.

    By phase the largest of: the mean bin; and, since among the k x bins + 1 largest items k + 1 share a bin, the
    smallest k + 1 of those. With ``per_bin`` given, such a bin is filled up with the smallest items; and of the m
    largest items either two share such a bin, or the m bins they are in hold the smallest items with them, each of
    those once.
    """
    bounds = []
    for column in weights.T:
        ordered = numpy.sort(column)[::-1]
        best = float(column.sum()) / num_bins
        smallest = numpy.concatenate(([0.0], numpy.cumsum(ordered[::-1])))
        sums = numpy.concatenate(([0.0], numpy.cumsum(ordered)))
        most = per_bin or -(-len(ordered) // num_bins)
        for shared in range(1, most + 1):
            last = (shared - 1) * num_bins + 1
            if last > len(ordered):
                break
            together = sums[last] - sums[last - shared]
            filled = smallest[min(per_bin - shared, len(ordered) - last)] if per_bin else 0.0
            best = max(best, float(together + filled))
        if per_bin > 1:
            best = max(best, _filled_bound(sums, smallest, num_bins, per_bin))
        bounds.append(best)
    return numpy.array(bounds)


def _filled_bound(sums: Array, smallest: Array, num_bins: int, per_bin: int) -> float:
    """Return the best bound of the m largest items, m up to the bins, from the sums of the largest and of the smallest
    items ``[count]``."""
    count: Array = numpy.arange(1, num_bins + 1)
    apart = (sums[count] + smallest[count * (per_bin - 1)]) / count
    together: Array = numpy.full(num_bins, numpy.inf)
    together[1:] = sums[count[1:]] - sums[count[1:] - 2] + smallest[per_bin - 2]
    return float(numpy.minimum(apart, together).max())


def _longest_first(total: Array, num_bins: int, per_bin: int) -> Array:
    """Assign items, largest first, to the lightest bin with a free place."""
    bins: Array = numpy.empty(len(total), dtype=numpy.int64)
    open_bins = [(0.0, index) for index in range(num_bins)]
    left = [per_bin or len(total)] * num_bins
    for item in numpy.argsort(-total, kind="stable").tolist():
        load, chosen = heapq.heappop(open_bins)
        bins[item] = chosen
        left[chosen] -= 1
        if left[chosen]:
            heapq.heappush(open_bins, (load + float(total[item]), chosen))
    return bins


def _largest_differences(total: Array, num_bins: int) -> Array:
    """Join partial partitions of one item per bin, those with the largest differences first, heavy against light."""
    order = numpy.argsort(-total, kind="stable").reshape(-1, num_bins)
    parts = [(float(total[row[0]] - total[row[-1]]), index) for index, row in enumerate(order)]
    loads = {index: total[row] for index, row in enumerate(order)}
    members = {index: row[None, :] for index, row in enumerate(order)}
    heap = [(-difference, index) for difference, index in parts]
    heapq.heapify(heap)
    following = len(order)
    while len(heap) > 1:
        (_, one), (_, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = loads.pop(one) + loads.pop(other)[::-1]
        place = numpy.argsort(-joined, kind="stable")
        loads[following] = joined[place]
        members[following] = numpy.concatenate((members.pop(one), members.pop(other)[:, ::-1]))[:, place]
        heapq.heappush(heap, (-float(joined[place[0]] - joined[place[-1]]), following))
        following += 1
    bins: Array = numpy.empty(len(total), dtype=numpy.int64)
    (rows,) = members.values()
    bins[rows] = numpy.arange(num_bins)[None, :]
    return bins
