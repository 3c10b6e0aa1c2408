"""Exchanges of items between bins that lower the heaviest bins."""

from __future__ import annotations

import numpy

from mindspeed_autoparallel.data.work import Array

_NUM_ROUNDS = 16
"""Rounds of exchanges in pairs of bins."""
_NUM_EVEN_ROUNDS = 4
"""The first of them, which even out all loads; the later ones lower what is above the caps."""
_EVENNESS = 1e-3
"""Weight of even loads relative to the excess above the caps."""
_SOME = 64
"""Items of the lightest bins that are tried first for one exchange, and four times as many as of the heaviest."""
_SPREAD = 1e-7
"""Weight of the spread of all bins relative to the heaviest one, so that exchanges on a plateau end."""


def loads_of(weights: Array, bins: Array, num_bins: int) -> Array:
    """Return ``[bin, phase]``: the weights of each bin's items."""
    loads = numpy.zeros((num_bins, weights.shape[1]))
    numpy.add.at(loads, bins, weights)
    return loads


def exchange_in_pairs(weights: Array, bins: Array, caps: Array, num_bins: int) -> Array:
    """Return bins after exchanges of one item in every pair of a heavy and a light bin at once.

    ``weights [item, phase]``, ``caps [phase]``: a load that is low enough. All bins hold equally many items. The
    squares of the loads fall, then those of what is above the caps.
    """
    members = numpy.argsort(bins, kind="stable").reshape(num_bins, -1)
    items = [(weights[:, phase] / max(cap, 1e-300))[members] for phase, cap in enumerate(caps.tolist())]
    for turn in range(_NUM_ROUNDS):
        loads = numpy.stack([one.sum(axis=1) for one in items])
        if (loads <= 1).all():
            break
        is_evening = turn < _NUM_EVEN_ROUNDS
        heavy, light = _pairs(loads, turn, is_evening)
        change: Array = numpy.zeros((*light.shape, members.shape[1], members.shape[1]))
        for one, load in zip(items, loads, strict=True):
            less = one[heavy][:, None, :, None] - one[light][:, :, None, :]
            high, low = load[heavy][:, None, None, None], load[light][:, :, None, None]
            # Half of the growth of high^2 + low^2.
            squares = less * (less - (high - low))
            change += squares if is_evening else _EVENNESS * squares + _above(high, low, less) - _above(high, low, 0.0)
        changes = change.reshape(len(heavy), -1)
        best = changes.argmin(axis=1)
        gains = numpy.flatnonzero(changes[numpy.arange(len(heavy)), best] < -1e-12)
        chosen, one_place, other_place = numpy.unravel_index(best[gains], change.shape[1:])
        here, there = (heavy[gains], one_place), (light[gains, chosen], other_place)
        for table in (members, *items):
            table[here], table[there] = table[there], table[here]
    found: Array = numpy.empty(len(weights), dtype=numpy.int64)
    found[members] = numpy.arange(num_bins)[:, None]
    return found


def _pairs(loads: Array, turn: int, is_evening: bool) -> tuple[Array, Array]:
    """Return ``[pair]`` heavy bins and ``[pair, choice]`` light ones for ``loads [phase, bin]``, relative to the caps.

    While evening, each turn takes the heavy bins of another phase, each with one light bin. Then those above a cap are
    heavy, each with as many light ones as there are for it, others every turn; no light bin is in two pairs.
    """
    half = loads.shape[1] // 2
    if is_evening:
        order = numpy.argsort(loads[turn % len(loads)])
        return order[::-1][:half], order[:half, None]
    above = numpy.maximum(loads - 1, 0).sum(axis=0)
    order = numpy.argsort(-above, kind="stable")
    number = min(half, int((above > 0).sum()))
    rest = order[number:]
    light = rest[numpy.argsort(loads[:, rest].max(axis=0))]
    choices = max(1, half // number)
    return order[:number], numpy.roll(light[: number * choices], turn).reshape(choices, number).T


def _above(high: Array, low: Array, less: Array | float) -> Array:
    """Return the squares of what is above the caps once ``less`` went from one bin to the other."""
    squares: Array = numpy.maximum(high - less - 1, 0) ** 2 + numpy.maximum(low + less - 1, 0) ** 2
    return squares


def exchange_along_heaviest(
    weights: Array, bins: Array, num_bins: int, enough: float, is_exact: bool, max_exchanges: int
) -> Array:
    """Exchange items of the heaviest bins for others, or (``is_exact`` False) for nothing, while the cost falls and is
    above ``enough``."""
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
        if highest.sum() <= enough:
            break
        # The phase with the largest possible gain first; others if it gains nothing.
        phases = numpy.argsort(mean - highest).tolist()
        for phase, look_at in [(phase, _SOME) for phase in phases] + [(phase, len(weights)) for phase in phases]:
            place = (int(loads[:, phase].argmax()), phase)
            gain, item, other = _best_exchange(weights, bins, loads, place, spread, look_at)
            if gain > 1e-12 * enough:
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
    light bin, and the two items. Of ``look_at`` and more items only some are tried."""
    heavy, important = place
    mine = numpy.flatnonzero(bins == heavy)
    if len(mine) > look_at // 4:
        mine = mine[numpy.argsort(-weights[mine, important])[:: 4 * len(mine) // look_at + 1]]
    per_bin = max(1, len(weights) // len(loads))
    light = numpy.argsort(loads[:, important])[: max(2, look_at // per_bin)]
    is_light: Array = numpy.zeros(len(loads), dtype=bool)
    is_light[light] = True
    is_light[heavy] = False
    others = numpy.flatnonzero(is_light[bins])
    if len(others) > 2 * look_at:
        others = others[numpy.argsort(-weights[others, important])[:: len(others) // look_at]]
    there = bins[others]
    cost: Array = numpy.zeros((len(mine), len(others)))
    for phase in range(weights.shape[1]):
        column, load = weights[:, phase], loads[:, phase]
        change = column[mine][:, None] - column[others]
        after_there = load[there] + change
        highest = numpy.maximum(load[heavy] - change, after_there)
        cost += numpy.maximum(highest, _highest_of_the_rest(load, heavy)[there])
        # after^2 + after_there^2 minus their present value
        change *= after_there - load[heavy]
        change *= 2 * spread
        cost += change
    best = int(cost.argmin())
    row, column = divmod(best, len(others))
    return float(loads.max(axis=0).sum() - cost.flat[best]), int(mine[row]), int(others[column])


def _highest_of_the_rest(load: Array, heavy: int) -> Array:
    """Return ``[bin]``: the heaviest ``load [bin]`` of all bins but that one and ``heavy``; 0 if there is none."""
    others = load.copy()
    others[heavy] = 0.0
    first = int(others.argmax())
    rest: Array = numpy.full(len(load), others[first])
    others[first] = 0.0
    rest[first] = others.max()
    return rest
