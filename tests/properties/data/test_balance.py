"""Shares of a batch: every sample once, bounds below the optimum, answers near it; against brute force."""

from __future__ import annotations

import itertools

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_autoparallel.data.balance import BatchShape, balance, in_order, short_at_the_ends
from mindspeed_autoparallel.data.partition import cost_of, lower_bound, partition
from mindspeed_autoparallel.data.work import COLUMNS, TOKENS, ModuleWork, WorkModel
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate
from reference_vlm.data.evenness import bound_of, evenness

BOTH = WorkModel(
    phases=(
        (ModuleWork(name="text_decoder", rows="tokens", linear=1.0, quadratic=0.01),),
        (ModuleWork(name="image_encoder", rows="patches", linear=0.5, quadratic=0.001),),
    )
)


def sizes_of(tokens: list[int], patches: list[int] | None = None) -> numpy.ndarray:
    sizes = numpy.zeros((len(tokens), len(COLUMNS)), dtype=numpy.int64)
    sizes[:, 0] = tokens
    if patches is not None:
        sizes[:, COLUMNS.index("patches")] = patches
        sizes[:, COLUMNS.index("squared_patches")] = numpy.array(patches) ** 2
    return sizes


@st.composite
def cases(draw: st.DrawFn) -> tuple[numpy.ndarray, int, int]:
    bins = draw(st.integers(2, 3))
    per_bin = draw(st.integers(1, 3 if bins == 2 else 2))
    phases = draw(st.integers(1, 2))
    number = bins * per_bin
    weight = st.floats(0, 100) if draw(st.booleans()) else st.integers(0, 9)
    rows = draw(st.lists(st.lists(weight, min_size=phases, max_size=phases), min_size=number, max_size=number))
    return numpy.array(rows, dtype=float), bins, per_bin


def optimum(weights: numpy.ndarray, num_bins: int, per_bin: int) -> float:
    best = numpy.inf
    for bins in itertools.product(range(num_bins), repeat=len(weights)):
        if not per_bin or all(bins.count(index) == per_bin for index in range(num_bins)):
            best = min(best, cost_of(weights, numpy.array(bins), num_bins))
    return float(best)


@settings(max_examples=120, deadline=None)
@given(cases(), st.booleans())
def test_the_optimum_lies_between_bound_and_answer(case: tuple[numpy.ndarray, int, int], is_exact: bool) -> None:
    weights, num_bins, per_bin = case
    bins = partition(weights, num_bins, per_bin if is_exact else 0)
    best, cost = optimum(weights, num_bins, per_bin if is_exact else 0), cost_of(weights, bins, num_bins)
    assert lower_bound(weights, num_bins, per_bin if is_exact else 0) <= best * (1 + 1e-9) + 1e-9
    assert cost >= best * (1 - 1e-9) - 1e-9
    # Graham's guarantee of longest-processing-time, which the answer never falls behind.
    if weights.shape[1] == 1 and not is_exact:
        assert cost <= best * (4 / 3 - 1 / (3 * num_bins)) + 1e-9
    if is_exact:
        assert numpy.bincount(bins, minlength=num_bins).tolist() == [per_bin] * num_bins


def test_answers_are_near_the_optimum() -> None:
    generator = numpy.random.default_rng(3)
    excess = []
    for _ in range(60):
        weights = generator.lognormal(0, 1, (8, 1))
        excess.append(cost_of(weights, partition(weights, 2, 4), 2) / optimum(weights, 2, 4) - 1)
    assert numpy.mean(excess) < 0.02 and max(excess) < 0.15


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_every_sample_lies_in_one_place(replicas: int, microbatches: int, size: int, is_padded: bool, draw) -> None:
    shape = BatchShape(num_replicas=replicas, num_microbatches=microbatches, micro_batch_size=size, is_padded=is_padded)
    number = shape.num_samples
    sizes = sizes_of([draw.randint(1, 500) for _ in range(number)], [draw.randint(0, 300) for _ in range(number)])
    found, before = balance(sizes, BOTH, shape), in_order(sizes, shape)
    for one in (found, before):
        assert one.shape == (replicas, microbatches, size)
        assert sorted(one.flatten().tolist()) == list(range(number))
        assert bound_of(sizes, BOTH, shape) <= evenness(sizes, BOTH, shape, one).cost * (1 + 1e-9)
    if is_padded and size > 1:
        # Padding counts: work as the microbatches really have it.
        longest = sizes[found, 0].max(axis=2)
        assert evenness(sizes, BOTH, shape, found).loads[:, 0] == pytest.approx(
            (size * (longest + 0.01 * longest**2)).sum(axis=1)
        )
    assert (balance(sizes.copy(), BOTH, shape) == found).all()


def test_a_skewed_batch_is_evened_out() -> None:
    shape = BatchShape(num_replicas=4, num_microbatches=8, micro_batch_size=1)
    sizes, skewed = sizes_of([10] * 28 + [1000] * 4), sizes_of([1000, 10, 10, 10] * 8)
    found = evenness(sizes, TOKENS, shape, balance(sizes, TOKENS, shape))
    assert found.imbalance == pytest.approx(1) and found.gap == pytest.approx(0)
    assert evenness(skewed, TOKENS, shape, in_order(skewed, shape)).imbalance > 3.5


def test_decoder_and_encoder_are_evened_out_together() -> None:
    # Long texts have no pictures here: balancing either alone leaves the other skewed.
    sizes = sizes_of([900, 100] * 8, [0, 400] * 8)
    shape = BatchShape(num_replicas=4, num_microbatches=4, micro_batch_size=1)
    assert evenness(sizes, BOTH, shape, balance(sizes, BOTH, shape)).imbalance == pytest.approx(1)
    assert evenness(sizes, BOTH, shape, in_order(sizes, shape)).imbalance > 1.5


@pytest.mark.parametrize(
    ("tokens", "shape", "words"),
    [
        ([5], BatchShape(num_replicas=2, num_microbatches=1, micro_batch_size=1), "1 samples are fewer than the 2 rep"),
        (
            [5] * 3,
            BatchShape(num_replicas=2, num_microbatches=1, micro_batch_size=1),
            "3 samples do not fill 2 replicas",
        ),
        (
            [5, 70],
            BatchShape(num_replicas=2, num_microbatches=1, micro_batch_size=1, max_tokens=64),
            "sample 1 of the batch has 70 tokens and fits no microbatch",
        ),
        (
            [50, 60, 5, 6],
            BatchShape(num_replicas=2, num_microbatches=1, micro_batch_size=2, max_tokens=64),
            "samples 1, 0 of the batch need 120 tokens",
        ),
    ],
)
def test_what_does_not_fit_is_named(tokens: list[int], shape: BatchShape, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        balance(sizes_of(tokens), TOKENS, shape)


def test_packed_microbatches_keep_within_the_limit_where_padded_ones_cannot() -> None:
    shape = BatchShape(num_replicas=2, num_microbatches=2, micro_batch_size=2, is_padded=False, max_tokens=70)
    found = balance(sizes_of([60, 58, 57, 55, 5, 6, 7, 8]), TOKENS, shape)
    assert sizes_of([60, 58, 57, 55, 5, 6, 7, 8])[found, 0].sum(axis=2).max() <= 70


def test_short_microbatches_at_the_ends_are_no_slower_than_drawn_orders() -> None:
    """Of all orders of six microbatches on four stages it lies in the fastest fifth on the mean."""
    generator, program = numpy.random.default_rng(0), make_program("1f1b", 4, 6)
    places = []
    for _ in range(6):
        times = generator.lognormal(0, 0.8, 6)
        steps = {
            order: simulate(
                program,
                StepTimes(
                    forward=[[float(times[k]) for k in order]] * 4, backward=[[float(2 * times[k]) for k in order]] * 4
                ),
            ).step_time
            for order in [*[*itertools.permutations(range(6))][::5], tuple(short_at_the_ends(times).tolist())]
        }
        mine = steps[tuple(short_at_the_ends(times).tolist())]
        places.append(numpy.mean([step < mine for step in steps.values()]))
    assert numpy.mean(places) < 0.2


def test_bounds_count_items_that_must_share_a_bin() -> None:
    assert lower_bound(numpy.array([[6.0], [6.0], [6.0]]), 2) == 12
    # Two of the five share a bin of three with the smallest of the others.
    assert lower_bound(numpy.array([[9.0], [9.0], [9.0], [1.0], [2.0], [3.0]]), 2, 3) == 19
    # The two tens are in different bins, and only one of them can have the 1 beside it: 12 is the optimum.
    weights = numpy.array([[10.0], [10.0], [5.0], [4.0], [2.0], [1.0]])
    assert lower_bound(weights, 3, 2) == 11.5 and optimum(weights, 3, 2) == 12


@pytest.mark.parametrize("phases", [1, 2])
def test_many_bins_are_near_the_bound(phases: int) -> None:
    """Long tails, 512 items on 64 bins: what a step of 64 replicas has to decide. Pictures are tokens, too."""
    for seed in range(4):
        weights = numpy.random.default_rng(seed).lognormal(0, 0.7, (512, phases))
        weights[:, 0] += weights[:, 1:].sum(axis=1)
        bins = partition(weights, 64, 8)
        assert cost_of(weights, bins, 64) < 1.02 * lower_bound(weights, 64, 8)
        assert numpy.bincount(bins).tolist() == [8] * 64


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 4), st.booleans(), st.randoms(use_true_random=False))
def test_packs_hold_every_sample_once(replicas: int, microbatches: int, size: int, is_filled: bool, draw) -> None:
    number = replicas * microbatches * size
    sizes = sizes_of([draw.randint(1, 100) for _ in range(number)], [draw.randint(0, 300) for _ in range(number)])
    shape = BatchShape(
        num_replicas=replicas,
        num_microbatches=microbatches,
        micro_batch_size=size,
        is_padded=False,
        is_filled=is_filled,
        max_tokens=100 * size,
    )
    found = balance(sizes, BOTH, shape)
    held = found[found >= 0]
    assert found.shape[:2] == (replicas, microbatches)
    assert sorted(held.tolist()) == list(range(number))
    assert (found >= 0).any(axis=2).all()
    tokens = numpy.append(sizes[:, 0], 0)[found].sum(axis=2)
    assert tokens.max() <= 100 * size
    work = numpy.concatenate((BOTH.of(sizes), numpy.zeros((1, 2))))[found].sum(axis=(1, 2))
    even = evenness(sizes, BOTH, shape, found)
    assert even.loads == pytest.approx(work) and even.bound <= even.cost * (1 + 1e-9)


@pytest.mark.parametrize("is_filled", [False, True])
def test_packs_are_as_even_as_single_samples(is_filled: bool) -> None:
    """Replicas first, packs within them: a pack of several samples costs no evenness."""
    tokens = numpy.clip(numpy.random.default_rng(5).lognormal(6, 0.8, 256), 16, 4000).astype(int)
    shape = BatchShape(
        num_replicas=16,
        num_microbatches=4,
        micro_batch_size=4,
        is_padded=False,
        is_filled=is_filled,
        max_tokens=8000 if is_filled else 0,
    )
    sizes = sizes_of(tokens.tolist())
    assert evenness(sizes, BOTH, shape, balance(sizes, BOTH, shape)).gap < 0.02


def test_a_batch_that_no_packs_hold_is_reported() -> None:
    shape = BatchShape(
        num_replicas=2, num_microbatches=1, micro_batch_size=2, is_padded=False, is_filled=True, max_tokens=10
    )
    with pytest.raises(ConfigError, match="the batch has 24 tokens, its 2 packs of 10 hold 20"):
        balance(sizes_of([6, 6, 6, 6]), TOKENS, shape)
    uneven = balance(sizes_of([9, 3, 3, 3]), TOKENS, shape)
    assert sorted(sorted(pack[pack >= 0].tolist()) for pack in uneven[:, 0]) == [[0], [1, 2, 3]]
