"""Share items between bins so that the fullest bin is as light as possible, and bound how light it can be.

An item has a weight for every phase; what is minimised is the sum over phases of the heaviest bin's weight. Balanced
Karmarkar-Karp (largest differencing) and longest-processing-time give two starts, exchanges along the heaviest bins
improve the better one. Michiels, Korst, Aarts, van Leeuwen: Performance ratios for the Karmarkar-Karp differencing
method, 2003; Graham: Bounds on multiprocessing timing anomalies, 1969.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy

from mindspeed_autoparallel.errors import ConfigError

Array = Any
"""A numpy array."""
MAX_EXCHANGES = 96
_SOME = 64
"""Items of the lightest bins that are looked at first for one exchange, and four times as many as of the heaviest."""
_NEAR_ENOUGH = 5e-3
"""Of the lower bound: nothing is gained by looking further."""
_SPREAD = 1e-7
"""How much the spread of all bins counts beside the heaviest one: exchanges on a plateau come to an end."""


@dataclass(frozen=True, kw_only=True)
class Partition:
    """``bins[i]`` is item ``i``'s bin."""

    bins: Array
    cost: float
    """Sum over phases of the heaviest bin's weight."""
    lower_bound: float
    """No partition costs less."""

    @property
    def gap(self) -> float:
        """Return how far the cost lies above the lower bound, as a share of it."""
        return self.cost / self.lower_bound - 1 if self.lower_bound > 0 else 0.0


def partition(weights: Array, num_bins: int, per_bin: int = 0, max_exchanges: int = MAX_EXCHANGES) -> Partition:
    """Return a partition of ``weights [item, phase]``; ``per_bin`` items in every bin, 0: any number.

    Raises ``ConfigError`` where the items cannot fill the bins.
    """
    number = len(weights)
    if num_bins < 1 or number < num_bins or (per_bin and number != num_bins * per_bin):
        raise ConfigError(
            f"{number} items cannot be shared between {num_bins} bins" + f" of {per_bin}." * bool(per_bin)
        )
    weights = numpy.asarray(weights, dtype=numpy.float64)
    bound = lower_bound(weights, num_bins, per_bin)
    total = weights.sum(axis=1)
    starts = [_longest_first(total, num_bins, per_bin)]
    if per_bin:
        starts.append(_largest_differences(total, num_bins))
    costs = [cost_of(weights, bins, num_bins) for bins in starts]
    bins = starts[costs.index(min(costs))]
    if num_bins > 1 and min(costs) > bound * (1 + _NEAR_ENOUGH):
        bins = _exchange(weights, bins, num_bins, bound, bool(per_bin), max_exchanges)
    return Partition(bins=bins, cost=cost_of(weights, bins, num_bins), lower_bound=bound)


def loads_of(weights: Array, bins: Array, num_bins: int) -> Array:
    """Return ``[bin, phase]``: the weights of each bin's items."""
    loads = numpy.zeros((num_bins, weights.shape[1]))
    numpy.add.at(loads, bins, weights)
    return loads


def cost_of(weights: Array, bins: Array, num_bins: int) -> float:
    """Return the sum over phases of the heaviest bin's weight."""
    return float(loads_of(weights, bins, num_bins).max(axis=0).sum())


def lower_bound(weights: Array, num_bins: int, per_bin: int = 0) -> float:
    """Return a cost that no partition of ``weights [item, phase]`` is below.

    By phase the largest of: the mean bin; and, since among the k x bins + 1 largest items k + 1 share a bin, the
    smallest k + 1 of those. With ``per_bin`` given, such a bin is filled up with the smallest items.
    """
    bound = 0.0
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
        bound += best
    return bound


def _longest_first(total: Array, num_bins: int, per_bin: int) -> Array:
    """Give items, largest first, to the lightest bin that still takes one."""
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


def _exchange(weights: Array, bins: Array, num_bins: int, bound: float, is_exact: bool, max_exchanges: int) -> Array:
    """Exchange items of the heaviest bins for others, or for nothing, while the cost falls."""
    number, bins = len(weights), bins.copy()
    if not is_exact:
        # An item of no weight in every bin: exchanging for it is a move.
        weights = numpy.concatenate((weights, numpy.zeros((num_bins, weights.shape[1]))))
        bins = numpy.concatenate((bins, numpy.arange(num_bins)))
    loads = loads_of(weights, bins, num_bins)
    mean = loads.mean(axis=0)
    spread = _SPREAD / max(float(loads.mean()), 1e-300)
    for _ in range(max_exchanges):
        highest = loads.max(axis=0)
        if highest.sum() <= bound * (1 + _NEAR_ENOUGH):
            break
        # The phase that has most to gain first; another one where nothing is gained there.
        phases = numpy.argsort(mean - highest).tolist()
        for phase, look_at in [(phase, _SOME) for phase in phases] + [(phase, len(weights)) for phase in phases]:
            place = (int(loads[:, phase].argmax()), phase)
            gain, item, other = _best_exchange(weights, bins, loads, place, spread, look_at)
            if gain > 1e-12 * bound:
                break
        else:
            break
        here, there = bins[item], bins[other]
        change = weights[item] - weights[other]
        loads[here] -= change
        loads[there] += change
        bins[item], bins[other] = there, here
    return bins[:number]


def _best_exchange(
    weights: Array, bins: Array, loads: Array, place: tuple[int, int], spread: float, look_at: int
) -> tuple[float, int, int]:
    """Return the largest gain of an exchange of an item of a bin that is heavy in a phase (``place``) with one of a
    light bin, and the two items. Of ``look_at`` and more items only some are looked at."""
    heavy, important = place
    mine = numpy.flatnonzero(bins == heavy)
    if len(mine) > look_at // 4:
        mine = mine[numpy.argsort(-weights[mine, important])[:: 4 * len(mine) // look_at + 1]]
    per_bin = max(1, len(weights) // len(loads))
    light = numpy.argsort(loads[:, important])[: max(2, look_at // per_bin)]
    others = numpy.flatnonzero(numpy.isin(bins, light[light != heavy]))
    if len(others) > 2 * look_at:
        others = others[numpy.argsort(-weights[others, important])[:: len(others) // look_at]]
    there = bins[others]
    rest = _highest_of_the_rest(loads, heavy)
    cost: Array = numpy.zeros((len(mine), len(others)))
    for phase in range(weights.shape[1]):
        column, load = weights[:, phase], loads[:, phase]
        change = column[mine][:, None] - column[others][None, :]
        after, after_there = load[heavy] - change, load[there][None, :] + change
        cost += numpy.maximum(numpy.maximum(after, after_there), rest[there, phase][None, :])
        # after^2 + after_there^2 less what they are now
        cost += 2 * spread * change * (load[there][None, :] - load[heavy] + change)
    best = int(cost.argmin())
    row, column = divmod(best, len(others))
    return float(loads.max(axis=0).sum() - cost.flat[best]), int(mine[row]), int(others[column])


def _highest_of_the_rest(loads: Array, heavy: int) -> Array:
    """Return ``[bin, phase]``: the heaviest load of all bins but that one and ``heavy``; 0 where there is none."""
    others = loads.copy()
    others[heavy] = 0.0
    first = others.argmax(axis=0)
    phases = numpy.arange(loads.shape[1])
    rest = numpy.repeat(others[first, phases][None, :], len(loads), axis=0)
    others[first, phases] = 0.0
    rest[first, phases] = others.max(axis=0)
    return rest
