"""The probability that a plan runs out of memory within a number of steps, with independently drawn samples.

A rank holds at most k microbatches at once, those of a window of its program. Its peak is at most the constant bytes,
plus the activations of the window, plus the bytes that live for one block of the largest microbatch. The distribution
of a microbatch's activations is rounded up to a grid and folded k times (FFT): the result is an upper bound of the true
probability. Windows, replicas, ranks and steps are joined by the union bound, so dependence between them does not
matter. For rearranged batches, ``arranged`` bounds every arrangement and ``drawn_failures`` draws. Formula X2 in
docs/data.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.data.statistics import unseen_share
from mindspeed_autoparallel.planner.spread.arranged import Cause, always, heaviest_exceed, some_sample
from mindspeed_autoparallel.planner.spread.drawn_failures import chance_of_failure
from mindspeed_autoparallel.planner.spread.draws import Array
from mindspeed_autoparallel.planner.spread.factors import SampleFactors
from mindspeed_autoparallel.planner.spread.rank_bytes import RankBytes, peaks_of_equal, rank_bytes
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Plan

NUM_CELLS = 2048
"""Number of cells of the grid of one microbatch's bytes."""
NUM_LONGEST = 48
"""Number of lengths that distinguish the longest of several samples in a microbatch."""
_NUM_SPLITS = 64
_NUM_COARSE_SPLITS = 10
Arrangement = Literal["none", "replica", "batch"]
Ways = Callable[[Array], Sequence[Array]]
"""Returns the possible arrangements ``[replica, microbatch, place]`` (indices of samples) of a batch ``[sample,
column]``."""
SMALLEST = 1e-12
"""Smaller probabilities are rounding errors of the transform: this one is reported instead."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """An upper bound of the probability that any rank of any replica runs out of memory."""

    probability: float
    num_steps: int
    pipeline_rank: int
    """The rank with the highest probability."""
    worst_bytes: int
    """Peak of that rank if the heaviest microbatch filled a window."""
    limit_bytes: int


def out_of_memory(
    profile: Profile,
    plan: Plan,
    data: Distribution,
    factors: SampleFactors,
    num_steps: int,
    arrangement: Arrangement = "none",
    ways: Ways | None = None,
    allowed: float = 0.0,
) -> OutOfMemory:
    """Return the bound for ``num_steps`` steps.

    ``arrangement``: what training rearranges: nothing, the order of a replica's microbatches, or the whole batch, for
    which every arrangement is possible. With ``ways``, if that bound exceeds ``allowed``, batches are drawn for the
    worst of these arrangements, with a confidence of all but one in a million. If only a part of the data was read, the
    probability of an unread record above the largest read one is added.
    """
    layout, number = plan.layout, plan.num_microbatches
    is_loaded = arrangement == "none" or factors.pack_length > 0
    results = []
    of_largest = _peaks_of_the_largest(profile, plan, data, factors) if layout.virtual_size > 1 else None
    for rank in rank_bytes(profile, plan):
        width = min(rank.window, number)
        held, heaviest = _held_distribution(rank, data, factors, layout.micro_batch_size)
        largest, chance = _largest_factor(data, factors, layout.micro_batch_size)
        places = (number - width + 1) * layout.data_size
        worst = rank.fixed + width * heaviest + rank.passing * float(largest[-1])
        if of_largest is not None:
            worst = min(worst, of_largest[rank.pipeline_rank])
        one = 0.0
        if worst > rank.limit and is_loaded:
            one = _tail_of_window(rank, held, heaviest, width, largest, chance)
        elif worst > rank.limit:
            places = layout.data_size if arrangement == "replica" else 1
            found = _causes_of_any_window(rank, data, factors, plan, plan.global_batch_size // places)
            one = max(SMALLEST, min(1.0, sum(cause.probability for cause in found)))
        results.append((min(1.0, one * places * num_steps), rank, worst))
    total = min(1.0, sum(probability for probability, _, _ in results))
    if total > allowed and ways is not None and not factors.pack_length:
        ranks = [rank for _, rank, worst in results if worst > rank.limit]
        one = _chance_by_drawing(ranks, plan, data, factors, ways, allowed / num_steps)
        total = min(total, max(SMALLEST, one) * num_steps)
    if not data.source.is_whole:
        unseen = unseen_share(data.source.num_read, data.source.num_records)
        total = min(1.0, total + unseen * plan.global_batch_size * num_steps)
    _, rank, worst = max(results, key=lambda item: (item[0], item[2] - item[1].limit))
    return OutOfMemory(
        probability=total,
        num_steps=num_steps,
        pipeline_rank=rank.pipeline_rank,
        worst_bytes=round(worst),
        limit_bytes=rank.limit,
    )


def _peaks_of_the_largest(profile: Profile, plan: Plan, data: Distribution, factors: SampleFactors) -> tuple[int, ...]:
    """Return every rank's peak if all microbatches are the largest.

    With virtual stages it is far below that of a window, which counts all chunks of each of its microbatches.
    """
    if factors.pack_length:
        return peaks_of_equal(profile, plan, factors.largest_pack(data, plan.layout.micro_batch_size))
    return peaks_of_equal(profile, plan, factors.largest(data))


def _chance_by_drawing(
    ranks: Sequence[RankBytes], plan: Plan, data: Distribution, factors: SampleFactors, ways: Ways, allowed: float
) -> float:
    """Return an upper bound of the probability that any of ``ranks``, of any replica, fails in a step under any of
    ``ways``."""
    all_sizes, batch_size = data.sizes(), plan.global_batch_size

    def fails(rows: Array) -> bool:
        sizes = all_sizes[rows]
        for samples in ways(sizes):
            replicas, number, places = samples.shape
            _, found = factors.of(sizes[samples.reshape(-1, places)])
            of_replicas = found.reshape(replicas, number, -1)
            if any((rank.peak(of_replicas) > rank.limit).any() for rank in ranks):
                return True
        return False

    causes = [cause for rank in ranks for cause in _causes_of_any_window(rank, data, factors, plan, batch_size)]
    return chance_of_failure(causes, data.shares(), batch_size, fails, allowed)


def _causes_of_any_window(
    rank: RankBytes, data: Distribution, factors: SampleFactors, plan: Plan, number: int
) -> list[Cause]:
    """Return causes of every batch of ``number`` samples with an arrangement in which a window exceeds the limit."""
    size, width = plan.layout.micro_batch_size, min(rank.window, plan.num_microbatches)
    left = rank.limit - rank.fixed
    sizes, shares = data.sizes(), data.shares()
    text, media = _sample_bytes(rank, sizes, factors, size)
    parts = tuple((values, count) for values, count in ((text, width), (media, width * size)) if values.any())
    _, rows = factors.of(sizes[:, None, :])
    of_row = rows.max(axis=1)
    largest, _ = _largest_factor(data, factors, 1)
    best = [always(len(shares))]
    for place in numpy.unique(numpy.linspace(0, len(largest) - 1, _NUM_COARSE_SPLITS).astype(int)):
        exceeded = some_sample(of_row > largest[place], shares, number)
        chance = sum(cause.probability for cause in best)
        if exceeded.probability >= chance:
            continue
        together = heaviest_exceed(parts, shares, number, left - rank.passing * float(largest[place]))
        if exceeded.probability + together.probability < chance:
            best = [cause for cause in (exceeded, together) if cause.probability > 0]
    return best


def _sample_bytes(rank: RankBytes, sizes: Array, factors: SampleFactors, size: int) -> tuple[Array, Array]:
    """Return bytes ``[row]`` of the text to which a microbatch of ``size`` is padded, and of the rest of a sample."""
    _, rows = factors.of(sizes[:, None, :])
    held = numpy.array(rank.held, dtype=numpy.float64)
    texts = numpy.array([work is not None and work.rows == "tokens" for work in factors.work])
    if factors.padding != "longest" or size == 1:
        return numpy.zeros(len(rows)), rows @ held / size
    return rows[:, texts] @ held[texts], rows[:, ~texts] @ held[~texts] / size


def _held_distribution(rank: RankBytes, data: Distribution, factors: SampleFactors, size: int) -> tuple[Array, float]:
    """Return the distribution of a microbatch's activations on the grid, rounded up, and its largest value in bytes.

    With several samples the padded text, by the longest of them, has a grid of its own; the rest adds up.
    """
    if factors.pack_length:
        # No pack holds more, in any arrangement.
        largest = float(factors.largest_pack(data, size) @ numpy.array(rank.held, dtype=numpy.float64))
        return (numpy.array([0.0, 1.0]), largest) if largest > 0 else (numpy.array([1.0]), 0.0)
    sizes, shares = data.sizes(), data.shares()
    text, media = _sample_bytes(rank, sizes, factors, size)
    is_padded = factors.padding == "longest" and size > 1
    heaviest = float(text.max() + size * media.max())
    if heaviest <= 0:
        return numpy.array([1.0]), 0.0
    cell = heaviest / (NUM_CELLS - 1)
    places = numpy.ceil(media / cell - 1e-9).astype(int)
    if not is_padded:
        return _folded(numpy.bincount(places, shares), size), cell * (size * int(places.max()))
    steps = numpy.ceil(text / max(float(text.max()), 1e-300) * (NUM_LONGEST - 1) - 1e-9).astype(int)
    total: Array = numpy.zeros(NUM_CELLS + NUM_LONGEST + 2 * NUM_CELLS)
    before: Array = numpy.zeros(1)
    for step in range(int(steps.max()) + 1):
        below = _folded(numpy.bincount(places, shares * (steps <= step)), size)
        shift = int(numpy.ceil(step * float(text.max()) / (NUM_LONGEST - 1) / cell - 1e-9))
        change = below.copy()
        change[: len(before)] -= before
        total[shift : shift + len(change)] += numpy.maximum(change, 0)
        before = below
    used = numpy.flatnonzero(total)
    return total[: used[-1] + 1], float(cell * used[-1])


def _folded(distribution: Array, times: int) -> Array:
    """Return the distribution of the sum of ``times`` independent draws."""
    length = times * (len(distribution) - 1) + 1
    folded: Array = numpy.fft.irfft(numpy.fft.rfft(distribution, 2 * length) ** times, 2 * length)[:length]
    return numpy.maximum(folded, 0)


def _largest_factor(data: Distribution, factors: SampleFactors, size: int) -> tuple[Array, Array]:
    """Return the values of a microbatch's largest factor in ascending order, and the probability to exceed each."""
    if factors.pack_length:
        return factors.largest_pack(data, size).max(keepdims=True), numpy.zeros(1)
    _, rows = factors.of(data.sizes()[:, None, :])
    values = rows.max(axis=1)
    order = numpy.argsort(values)
    below: Array = numpy.cumsum(data.shares()[order])
    keep: Array = numpy.append(numpy.flatnonzero(numpy.diff(values[order])), len(values) - 1)
    # The mean over a microbatch's samples is at most the largest of them.
    chance = 1 - numpy.minimum(below[keep], 1.0) ** size
    chance[-1] = 0.0
    return values[order][keep], chance


def _tail_of_window(rank: RankBytes, held: Array, heaviest: float, width: int, largest: Array, chance: Array) -> float:
    """Return an upper bound of P(window of activations + passing bytes > limit), the best over several splits of the
    limit."""
    left = rank.limit - rank.fixed
    if left < 0:
        return 1.0
    if heaviest <= 0:
        fitting = largest * rank.passing <= left
        return float(chance[fitting][-1] * width) if fitting.any() else 1.0
    cell = heaviest / (len(held) - 1)
    folded = _folded(held, width)
    above: Array = numpy.append(numpy.cumsum(folded[::-1])[::-1], 0.0)
    best = 1.0
    for place in numpy.unique(numpy.linspace(0, len(largest) - 1, _NUM_SPLITS).astype(int)):
        allowed = left - rank.passing * float(largest[place])
        if allowed < 0:
            continue
        first = min(len(folded), int(numpy.floor(allowed / cell + 1e-9)) + 1)
        best = min(best, float(above[first]) + float(chance[place]) * width)
    return max(best, SMALLEST)
