"""Global batches drawn from a distribution with little variance, so that few of them already have its mean."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from mindspeed_autoparallel.data.distribution import Distribution

Array: TypeAlias = NDArray[Any]


def draw_batches(data: Distribution, weight: Array, num_draws: int, batch_size: int, seed: int) -> Array:
    """Return ``[draw, sample]``: indices of the distribution's rows, which are ordered by ``weight [row]``.

    A Latin hypercube: every place of the batch gets each of ``num_draws`` equal slices of the ordered distribution
    once, and different places get different parts of a slice. Each place has the distribution of an independent draw,
    and the mean over the draws is nearly that of the distribution. McKay, Beckman, Conover: A comparison of three
    methods for selecting values of input variables, 1979.
    """
    generator = numpy.random.default_rng(seed)
    order = numpy.argsort(weight, kind="stable")
    cumulative: Array = numpy.cumsum(data.shares()[order])
    slices = numpy.argsort(generator.random((num_draws, batch_size)), axis=0)
    parts = numpy.argsort(generator.random((num_draws, batch_size)), axis=1)
    inside = (parts[slices, numpy.arange(batch_size)] + generator.random((num_draws, batch_size))) / batch_size
    places = numpy.searchsorted(cumulative, (slices + inside) / num_draws * cumulative[-1], side="right")
    rows: Array = order[numpy.minimum(places, len(order) - 1)]
    return rows
