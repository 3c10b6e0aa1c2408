"""The probability that a rearranged batch runs out of memory, bounded by drawing batches that may fail.

The bound over all arrangements (``arranged``) names causes: without a cause no arrangement fails. Batches with a cause
are drawn (by tilting the distribution and rejecting), arranged as training arranges them, and the failing ones are
counted. The probabilities of the causes times the largest share that the count allows bound the probability of failing,
with a confidence of all but one in a million. Karp, Luby, Madras: Monte-Carlo approximation algorithms for enumeration
problems, 1989 (several causes of one batch); Chernoff's bound by relative entropy for the share. Formula X2 in
docs/data.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy

from mindspeed_autoparallel.planner.spread.arranged import Cause, always
from mindspeed_autoparallel.planner.spread.draws import Array

_STAGES = (64, 1024, 4096)
"""Numbers of batches after which drawing may stop."""
_ENOUGH = 32
"""Number of failures after which drawing stops."""
_UNCERTAINTY = 1e-6
"""Probability that the bound is too low, over all stages."""
_CHUNK = 256
_MAX_CHUNKS = 256
"""Number of chunks of drawn batches for one cause, at most."""
_HOPELESS = 8.0
"""Ratio of the estimate to the allowed probability above which it is not refined."""
_SEED = 20261123


def chance_of_failure(
    causes: Sequence[Cause], shares: Array, number: int, fails: Callable[[Array], bool], allowed: float
) -> float:
    """Return an upper bound of the probability that a batch of ``number`` samples of ``shares [row]`` fails.

    ``fails`` returns whether the batch of rows ``[sample]`` fails, which requires one of ``causes``. Drawing ends early
    if the bound is at most ``allowed``, or far above it.
    """
    total = sum(cause.probability for cause in causes)
    if total >= 1:
        causes, total = [always(len(shares))], 1.0
    if total <= allowed:
        return total
    generator = numpy.random.default_rng(_SEED)
    sources = [_Source(cause, shares, number, generator) for cause in causes]
    weights = [cause.probability / total for cause in causes]
    bound, failed, done = total, 0.0, 0
    for stage in _STAGES:
        for source in generator.choice(len(causes), stage - done, p=weights):
            batch = sources[source].next()
            if batch is None:
                return bound
            if fails(batch):
                failed += 1 / max(1, sum(cause.holds(batch) for cause in causes))
        done = stage
        bound = min(bound, total * _largest_share(failed / done, done, _UNCERTAINTY / len(_STAGES)))
        is_hopeless = failed >= 4 and total * failed / done > _HOPELESS * allowed > 0
        if bound <= allowed or failed >= _ENOUGH or is_hopeless:
            break
    return bound


class _Source:
    """Independently drawn batches with a cause."""

    def __init__(self, cause: Cause, shares: Array, number: int, generator: numpy.random.Generator) -> None:
        self._cause, self._number, self._generator = cause, number, generator
        self._tilt = _tilt(cause.excess, shares, cause.least / number)
        tilted = shares * numpy.exp(self._tilt * (cause.excess - cause.excess.max()))
        self._cumulative: Array = numpy.cumsum(tilted / tilted.sum())
        self._batches: list[Array] = []
        self._num_chunks = 0

    def next(self) -> Array | None:
        """Return rows ``[sample]``, or ``None`` if too few of the drawn batches have the cause."""
        while not self._batches:
            if self._num_chunks == _MAX_CHUNKS:
                return None
            self._num_chunks += 1
            places = self._generator.random((_CHUNK, self._number))
            rows = numpy.searchsorted(self._cumulative, places, side="right").clip(max=len(self._cumulative) - 1)
            beyond = self._cause.excess[rows].sum(axis=1) - self._cause.least
            # The tilt draws too many of the batches with a larger excess.
            kept = (beyond > 0) & (self._generator.random(_CHUNK) < numpy.exp(-self._tilt * beyond.clip(0)))
            self._batches = list(rows[kept])
        return self._batches.pop()


def _tilt(excess: Array, shares: Array, mean: float) -> float:
    """Return the exponent with which the tilted mean of ``excess`` is ``mean``; 0 if the mean is higher
    without tilt."""
    spread = float(excess.max())
    if spread <= 0 or float(shares @ excess) >= mean:
        return 0.0
    low, high = 0.0, 64.0 / spread
    for _ in range(50):
        middle = (low + high) / 2
        weights = shares * numpy.exp(middle * (excess - spread))
        low, high = (middle, high) if float(weights @ excess) < mean * float(weights.sum()) else (low, middle)
    return low


def _largest_share(mean: float, number: int, uncertainty: float) -> float:
    """Return the largest share that is plausible after ``number`` draws in [0, 1] with this mean."""
    low, high = mean, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if number * _entropy(mean, middle) < -math.log(uncertainty):
            low = middle
        else:
            high = middle
    return high


def _entropy(mean: float, share: float) -> float:
    """Return the relative entropy of two Bernoulli distributions."""
    found = 0.0
    for one, other in ((mean, share), (1 - mean, 1 - share)):
        if one > 0:
            found += one * math.log(one / other) if other > 0 else math.inf
    return found
