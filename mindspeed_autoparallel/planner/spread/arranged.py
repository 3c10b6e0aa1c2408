"""Memory of rearranged batches: the heaviest samples of a batch may meet in one window of one pipeline.

After sorting or balancing, the microbatches of a window are not independent draws but a selection of the batch. In any
arrangement they hold at most the k heaviest of the n samples to choose from. For every threshold t the sum of the k
largest of n values is at most k t plus the sum over all n of the excess above t. The excesses are independent: their
sum has the distribution of one value folded n times. The best of several thresholds counts. Formula X2 in docs/data.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.planner.spread.draws import Array

_NUM_CELLS = 2047
"""With the empty one a power of two: of other lengths a Fourier transform takes up to thirteen times as long."""
_TIMES_EXPECTED = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Thresholds that this many times k samples of a batch exceed on average."""
_SHARES = (0.5, 0.75, 0.9, 1.0)
"""Thresholds as shares of the bytes allowed per sample of k."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Batches whose samples' ``excess [row]`` sums to more than ``least``.

    ``probability`` is an upper bound of the share of such batches.
    """

    probability: float
    excess: Array
    least: float

    def holds(self, rows: Array) -> bool:
        """Return whether the batch with samples ``rows [sample]`` has this cause."""
        return float(self.excess[rows].sum()) > self.least


def always(num_rows: int) -> Cause:
    """Return the cause that every batch has."""
    return Cause(probability=1.0, excess=numpy.zeros(num_rows), least=-1.0)


def some_sample(is_it: Array, shares: Array, number: int) -> Cause:
    """Return the cause of batches of ``number`` samples with at least one sample for which ``is_it [row]`` is true."""
    chance = float(shares[is_it].sum())
    probability = -math.expm1(number * math.log1p(-chance)) if chance < 1 else 1.0
    return Cause(probability=probability, excess=is_it.astype(numpy.float64), least=1 - 1e-9)


def heaviest_exceed(parts: tuple[tuple[Array, int], ...], shares: Array, number: int, allowed: float) -> Cause:
    """Return a cause of every batch whose heaviest of ``number`` samples together exceed ``allowed`` bytes.

    ``parts``: bytes ``[row]`` by row of the distribution, and the number of samples that hold them; the parts add up.
    ``shares [row]``: probabilities of the distribution's rows.
    """
    best = always(len(shares))
    for thresholds in _thresholds(parts, shares, number, allowed) if allowed >= 0 else ():
        left = allowed - sum(
            min(count, number) * threshold for (_, count), threshold in zip(parts, thresholds, strict=True)
        )
        if left < 0:
            continue
        above: Array = sum(
            numpy.maximum(values - threshold, 0.0) for (values, _), threshold in zip(parts, thresholds, strict=True)
        )
        chance = _chance_of_sum(above, shares, number, left)
        if chance < best.probability:
            best = Cause(probability=chance, excess=above, least=left)
    return best


def _thresholds(
    parts: tuple[tuple[Array, int], ...], shares: Array, number: int, allowed: float
) -> list[tuple[float, ...]]:
    """Return combinations of one threshold per part."""
    found: list[tuple[float, ...]] = [tuple(0.0 for _ in parts)]
    for times in _TIMES_EXPECTED:
        found.append(tuple(_exceeded(values, shares, times * count / number) for values, count in parts))
    heaviest = [float(values.max()) for values, _ in parts]
    whole = sum(most * count for most, (_, count) in zip(heaviest, parts, strict=True))
    for share in _SHARES:
        found.append(tuple(share * most * min(1.0, allowed / whole) if whole else 0.0 for most in heaviest))
    smallest = tuple(float(values.min()) for values, _ in parts)
    return list(dict.fromkeys([*found, smallest]))


def _exceeded(values: Array, shares: Array, chance: float) -> float:
    """Return the smallest of ``values`` that a sample exceeds with at most the probability ``chance``."""
    order = numpy.argsort(values)[::-1]
    above: Array = numpy.cumsum(shares[order])
    place = int(numpy.searchsorted(above, min(chance, 1.0 - 1e-12), side="right"))
    return float(values[order[min(place, len(order) - 1)]])


def _chance_of_sum(values: Array, shares: Array, number: int, allowed: float) -> float:
    """Return an upper bound of P(sum of ``number`` independent draws of ``values`` > ``allowed``)."""
    if number * float(values.max()) <= allowed:
        return 0.0
    if allowed <= 0:
        return float(min(1.0, number * shares[values > 0].sum()))
    cell = allowed / _NUM_CELLS
    places = numpy.ceil(values / cell - 1e-9)
    kept = places <= _NUM_CELLS
    one: Array = numpy.bincount(places[kept].astype(int), shares[kept], minlength=_NUM_CELLS + 1)
    total: Array = numpy.zeros(_NUM_CELLS + 1)
    total[0] = 1.0
    while number:
        if number & 1:
            total = _added(total, one)
        number >>= 1
        if number:
            one = _added(one, one)
    return float(min(1.0, max(0.0, 1.0 - total.sum())))


def _added(first: Array, second: Array) -> Array:
    """Return the distribution of the sum of two independent values, cut to the grid."""
    size = 2 * len(first)
    spectrum = numpy.fft.rfft(first, size)
    other = spectrum if second is first else numpy.fft.rfft(second, size)
    folded: Array = numpy.fft.irfft(spectrum * other, size)
    return numpy.maximum(folded[: len(first)], 0.0)
