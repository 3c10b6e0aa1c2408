"""Summary figures of a distribution, with 95 % confidence intervals if only a part of the data was read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.data.work import SHOWN_COLUMNS, Array

CONFIDENCE = 0.95
_DEVIATIONS = 1.959964
"""Standard deviations of a two-sided 95 % interval of the normal distribution."""
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the whole data set: its estimate, and a 95 % confidence interval (of width 0 if all was read)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One column."""

    name: str
    mean: Figure
    quantiles: tuple[Figure, ...]
    """Those of ``QUANTILES``."""
    largest: int
    share_without: float
    """Share of the samples without any."""


def summarize(data: Distribution) -> tuple[Summary, ...]:
    """Return a summary of every column with nonzero values."""
    summaries = []
    for name in SHOWN_COLUMNS:
        values, counts = data.column(name)
        if values[-1] == 0:
            continue
        summaries.append(
            Summary(
                name=name,
                mean=_mean(values, counts, data),
                quantiles=tuple(quantile(values, counts, share, data.source.num_records) for share in QUANTILES),
                largest=int(values[-1]),
                share_without=float(counts[0] / counts.sum()) if values[0] == 0 else 0.0,
            )
        )
    return tuple(summaries)


def _mean(values: Array, counts: Array, data: Distribution) -> Figure:
    number = int(counts.sum())
    mean = float((values * counts).sum() / number)
    if data.source.is_whole or number < 2:
        return Figure(value=mean, low=mean, high=mean)
    variance = float((counts * (values - mean) ** 2).sum() / (number - 1))
    unread = 1 - number / data.source.num_records
    error = _DEVIATIONS * math.sqrt(variance / number * unread)
    return Figure(value=mean, low=mean - error, high=mean + error)


def quantile(values: Array, counts: Array, share: float, num_records: int) -> Figure:
    """Return a quantile and the order statistics around it (binomial counts by the normal approximation).

    ``values`` ascending, ``counts`` how often each was read, of ``num_records`` in all. No shape is assumed.
    """
    ends: Array = numpy.cumsum(counts)
    number = int(ends[-1])

    def at(rank: float) -> float:
        place = min(number, max(1, math.ceil(rank)))
        return float(values[numpy.searchsorted(ends, place)])

    if number >= num_records:
        return Figure(value=at(share * number), low=at(share * number), high=at(share * number))
    error = _DEVIATIONS * math.sqrt(number * share * (1 - share) * (1 - number / num_records))
    return Figure(value=at(share * number), low=at(share * number - error), high=at(share * number + error + 1))


def unseen_share(num_read: int, num_records: int) -> float:
    """Return the largest share of the records that may lie above the largest one read, at 95 % confidence."""
    return 0.0 if num_read >= num_records else 1 - (1 - CONFIDENCE) ** (1 / num_read)


def padding_share(values: Array, counts: Array, group: int) -> float:
    """Return the share of padding if ``group`` randomly drawn samples are padded to the longest of them."""
    below = numpy.concatenate(([0.0], numpy.cumsum(counts) / counts.sum())) ** group
    longest = float((values * numpy.diff(below)).sum())
    return 1 - float((values * counts).sum() / counts.sum()) / longest


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """``counts[i]`` samples lie from ``edges[i]`` up to, not including, ``edges[i + 1]``; the last bin has its end."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


def histogram(values: Array, counts: Array, num_bins: int = 40) -> Histogram:
    """Return a histogram of whole numbers: bins of equal width, or of equal ratio where the largest is far away."""
    low, high = float(values[0]), float(values[-1])
    ordered: Array = numpy.cumsum(counts)
    median = float(values[numpy.searchsorted(ordered, ordered[-1] / 2)])
    if high - low < num_bins:
        edges = numpy.arange(low, high + 2)
    elif low >= 1 and high > 8 * median:
        edges = numpy.unique(numpy.round(numpy.geomspace(low, high + 1, num_bins + 1)))
    else:
        edges = numpy.unique(numpy.round(numpy.linspace(low, high + 1, num_bins + 1)))
    found, _ = numpy.histogram(values, edges, weights=counts)
    return Histogram(edges=tuple(map(float, edges)), counts=tuple(int(count) for count in found))


@dataclass(frozen=True, kw_only=True)
class JointHistogram:
    """``counts[i][j]``: samples in bin ``i`` of the first column and bin ``j`` of the second."""

    names: tuple[str, str]
    edges: tuple[tuple[float, ...], tuple[float, ...]]
    counts: tuple[tuple[int, ...], ...]
    correlation: float


def joint(data: Distribution, names: Sequence[str], num_bins: int = 16) -> JointHistogram:
    """Return the joint histogram of two columns that both vary."""
    sizes, weights = data.sizes(), numpy.array(data.weights, dtype=numpy.float64)
    pair: Any = [sizes[:, data.columns.index(name)].astype(numpy.float64) for name in names]
    edges: list[Any] = [histogram(*data.column(name), num_bins=num_bins).edges for name in names]
    found, _ = numpy.histogramdd(pair, bins=edges, weights=weights)
    means = [float((values * weights).sum() / weights.sum()) for values in pair]
    spread = [math.sqrt(float((weights * (v - m) ** 2).sum())) for v, m in zip(pair, means, strict=True)]
    both = float((weights * (pair[0] - means[0]) * (pair[1] - means[1])).sum())
    return JointHistogram(
        names=(names[0], names[1]),
        edges=(edges[0], edges[1]),
        counts=tuple(tuple(int(count) for count in row) for row in found),
        correlation=both / (spread[0] * spread[1]) if min(spread) > 0 else 0.0,
    )
