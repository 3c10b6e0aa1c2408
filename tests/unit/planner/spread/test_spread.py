"""Plans for data whose samples differ: factors, drawn steps, memory, packs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy
import pytest
from spread_samples import LENGTH, data_of, long_tail, one_plan, profile_of, sample, searched

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.spread.choose import choose_plan
from mindspeed_autoparallel.planner.spread.drawn_steps import PlanUnderData
from mindspeed_autoparallel.planner.spread.draws import draw_batches
from mindspeed_autoparallel.planner.spread.factors import sample_factors
from mindspeed_autoparallel.planner.spread.memory import out_of_memory
from mindspeed_autoparallel.planner.spread.rank_bytes import rank_bytes, windows
from mindspeed_autoparallel.planner.spread.samples import SpreadOptions
from mindspeed_autoparallel.planner.spread.scaled import scaled_profile
from mindspeed_autoparallel.planner.spread.waiting import waiting
from mindspeed_autoparallel.schedule import make_program
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.units import MIB


def test_samples_like_the_profiles_have_factor_one_and_the_planned_step() -> None:
    profile, data = profile_of(), data_of([sample(LENGTH, 64)] * 9)
    factors = sample_factors(profile, data)
    times, rows = factors.of(data.sizes()[:, None, :])
    assert times == pytest.approx(1) and rows == pytest.approx(1)
    plan = one_plan(profile)
    drawn = PlanUnderData(profile, plan, factors).drawn(data, 3)
    assert drawn.in_order == pytest.approx(plan.step.total_us, rel=1e-9)
    assert drawn.balanced == pytest.approx(plan.step.total_us, rel=1e-9) and drawn.imbalance == pytest.approx(1)


def test_time_is_linear_in_rows_plus_attention() -> None:
    profile = profile_of()
    decoder = sample_factors(profile, data_of([sample(LENGTH, 64)])).work[1]
    assert decoder is not None
    # A layer of 2**20 parameters and width 512: 4 x 512 x 1024 / 2 operations a token beside 2 x 2**20.
    share = (4 * 512 * 1024 / 2) / (2 * 2**20 + 4 * 512 * 1024 / 2)
    assert decoder.quadratic * LENGTH**2 == pytest.approx(share)
    assert decoder.linear * LENGTH == pytest.approx(1 - share)


def test_the_step_is_that_of_the_slowest_replica() -> None:
    profile, data = profile_of(), data_of([sample(LENGTH, 64), sample(100, 16)])
    factors = sample_factors(profile, data)
    under = PlanUnderData(profile, one_plan(profile), factors)
    heavy, light = numpy.array(sample(LENGTH, 64)), numpy.array(sample(100, 16))
    sizes = numpy.stack([numpy.stack([light] * 8), numpy.stack([light] * 8)])[:, :, None, :]
    all_light = under.step_us(sizes)
    sizes[1, 3, 0] = heavy
    one_heavy = under.step_us(sizes)
    sizes[0, 3, 0] = heavy
    assert one_heavy > all_light and under.step_us(sizes) == pytest.approx(one_heavy)


def test_rearranging_shortens_drawn_steps() -> None:
    profile, data = profile_of(), data_of(long_tail())
    drawn = PlanUnderData(profile, one_plan(profile, batch=32), sample_factors(profile, data)).drawn(data, 16)
    assert drawn.imbalance > 1.05
    assert (drawn.balanced < drawn.in_order).all()


@pytest.mark.parametrize("padding", ["longest", "sequence", "none"])
def test_mean_factors_are_those_of_every_microbatch_there_is(padding: str) -> None:
    samples = [sample(50, 16), sample(300, 4), sample(300), sample(1000, 64)]
    data = data_of([*samples, samples[1]])
    factors = sample_factors(profile_of(), data, padding)
    sizes, shares = data.sizes(), data.shares()
    for size in (1, 2, 3):
        every = numpy.array(list(itertools.product(range(len(sizes)), repeat=size)))
        chances = shares[every].prod(axis=1)
        expected = [chances @ of for of in factors.of(sizes[every])]
        for found, wanted in zip(factors.mean(data, size), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-12)


def test_few_drawn_batches_have_the_mean_of_the_distribution_and_each_place_its_spread() -> None:
    data = data_of(long_tail(2000))
    tokens, shares = data.sizes()[:, 0].astype(float), data.shares()
    mean = float(tokens @ shares)
    for seed in range(5):
        rows = draw_batches(data, tokens, 64, 32, seed)
        assert tokens[rows].mean() == pytest.approx(mean, rel=2e-3)
        # At every place: the median and the upper quarter of the distribution, within a slice of it.
        for place in (0, 31):
            drawn = numpy.sort(tokens[rows[:, place]])
            for share in (0.5, 0.75):
                below = shares[tokens <= drawn[int(64 * share)]].sum()
                assert below == pytest.approx(share, abs=0.04)
        # Samples of a batch are independent: neighbours do not go together.
        assert abs(numpy.corrcoef(tokens[rows[:, 0]], tokens[rows[:, 1]])[0, 1]) < 0.5


@pytest.mark.parametrize("seed", range(4))
def test_the_spread_costs_nothing_where_nothing_waits(seed: int) -> None:
    data = data_of(long_tail(2000, seed))
    plan = choose_plan(
        profile_of(),
        data,
        SpreadOptions(max_oom_probability=1.0),
        searched(Cluster(num_nodes=1, devices_per_node=1), 32),
    )
    assert plan.data is not None and plan.data.mean_error_us > 0
    assert plan.data.mean_us == pytest.approx(plan.data.by_means_us, rel=2e-3)


@pytest.mark.parametrize(("pipeline", "factor"), [(1, 1.0), (2, 1.0), (2, 3.0), (4, 0.4), (4, 2.0)])
def test_peaks_of_equal_microbatches_are_bounded_closely(pipeline: int, factor: float) -> None:
    profile = profile_of(4000)
    plan = one_plan(profile, pipeline, 1)
    names = [module.name for module in profile.model.modules]
    scaled = scaled_profile(profile, {1: (dict.fromkeys(names, 1.0), dict.fromkeys(names, factor))})
    exact = evaluate(scaled, plan.cluster, plan.layout, ModulePlacement.of_plan(plan), 16)
    for rank, memory in zip(rank_bytes(profile, plan), exact.memory, strict=True):
        bound = rank.peak(numpy.full((16, 2), factor))
        in_step = memory.peak_bytes if "transient" in memory.terms else 0
        assert bound >= in_step
        if in_step:
            assert bound <= 1.05 * in_step + 6 * factor * MIB * rank.window


@pytest.mark.parametrize("group", [0, 4])
@pytest.mark.parametrize(("pipeline", "chunks", "padding"), [(2, 2, "longest"), (2, 3, "none"), (3, 2, "sequence")])
def test_virtual_stages_that_hold_the_largest_microbatches_everywhere_are_safe(
    pipeline: int, chunks: int, padding: str, group: int
) -> None:
    """A window counts all chunks of its microbatches, of which a rank holds some."""
    profile, data = profile_of(4000), data_of(long_tail())
    layout = Layout(
        pipeline_size=pipeline,
        virtual_size=chunks,
        schedule="interleaved",
        microbatch_group_size=group * (group > pipeline),
    )
    plan = searched(Cluster(num_nodes=1, devices_per_node=pipeline), 24)(profile, [layout])
    factors = sample_factors(profile, data, padding)
    largest = factors.largest(data)
    sizes = dict(zip([module.name for module in profile.model.modules], largest.tolist(), strict=True))
    scaled = scaled_profile(profile, {1: (dict.fromkeys(sizes, 1.0), sizes)})
    held = evaluate(scaled, plan.cluster, plan.layout, ModulePlacement.of_plan(plan), 24)
    needed = max(memory.peak_bytes for memory in held.memory)
    enough, less = (replace(plan, cluster=replace(plan.cluster, memory_limit_bytes=needed - one)) for one in (0, MIB))
    safe = out_of_memory(profile, enough, data, factors, 10**6)
    assert safe.probability == 0 and safe.worst_bytes <= needed
    assert out_of_memory(profile, less, data, factors, 10**6).probability > 0


def test_windows_are_those_of_the_programs() -> None:
    assert windows(make_program("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert windows(make_program("gpipe", 2, 5)) == (5, 5)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_runs_of_drawn_data_fail_no_more_often_than_the_bound(micro_batch_size: int) -> None:
    profile, data = profile_of(4000), data_of(long_tail())
    if micro_batch_size > 1:
        measured = [replace(one, at=replace(one.at, micro_batch_size=2)) for one in profile.measurements]
        profile = replace(profile, measurements=tuple(measured))
    cluster = Cluster(num_nodes=1, devices_per_node=4)
    layout = Layout(pipeline_size=2, data_size=2, micro_batch_size=micro_batch_size)
    plan = search(profile, cluster, 32, SearchOptions(layouts=[layout], with_relaxations=False, num_workers=1))
    factors = sample_factors(profile, data)
    generator, sizes = numpy.random.default_rng(0), data.sizes()
    drawn = generator.choice(len(sizes), (2000, 2, 16 // micro_batch_size, micro_batch_size), p=data.shares())
    ranks = rank_bytes(profile, plan)
    peaks = numpy.array(
        [[max(rank.peak(factors.of(sizes[replica])[1]) for replica in step) for rank in ranks] for step in drawn]
    )
    bounds = []
    for share in (0.5, 0.9, 0.99, 0.999):
        limit = int(numpy.quantile(peaks[:, 0], share))
        limited = replace(plan, cluster=replace(cluster, memory_limit_bytes=limit))
        bound = out_of_memory(profile, limited, data, factors, 1)
        fails = float((peaks > limit).any(axis=1).mean())
        # 2,000 steps: three standard deviations.
        assert fails <= bound.probability + 3 * numpy.sqrt(max(fails, 1e-3) / 2000)
        bounds.append(bound.probability)
    assert bounds == sorted(bounds, reverse=True)
    enough = replace(plan, cluster=replace(cluster, memory_limit_bytes=bound.worst_bytes))
    assert out_of_memory(profile, enough, data, factors, 10**6).probability == 0


def test_too_many_unread_records_rule_out_a_safe_bound() -> None:
    profile, data = profile_of(), data_of(long_tail(100), num_records=10**6)
    plan = one_plan(profile)
    assert out_of_memory(profile, plan, data, sample_factors(profile, data), 100).probability == 1


def test_packs_filled_to_a_length_have_the_work_of_their_samples_and_never_hold_more_than_it() -> None:
    profile, data = profile_of(), data_of(long_tail())
    measured = [replace(one, at=replace(one.at, micro_batch_size=4)) for one in profile.measurements]
    profile = replace(profile, measurements=tuple(measured))
    cluster, layout = (
        Cluster(num_nodes=1, devices_per_node=4),
        Layout(pipeline_size=2, data_size=2, micro_batch_size=4),
    )
    plan = search(profile, cluster, 64, SearchOptions(layouts=[layout], with_relaxations=False, num_workers=1))
    fixed, filled = (sample_factors(profile, data, "none", length) for length in (0, 1200))
    of_four = PlanUnderData(profile, plan, fixed).drawn(data, 8).balanced
    to_length = PlanUnderData(profile, plan, filled).drawn(data, 8).balanced
    assert to_length.mean() == pytest.approx(of_four.mean(), rel=2e-2)
    # By hand: a pack of two samples beside one of six, in places of six; four of 1,024 tokens are the reference.
    sizes = numpy.zeros((2, 6, len(sample(1))), dtype=numpy.int64)
    sizes[0, :2], sizes[1, :] = sample(300, 64), sample(100, 0)
    encoder, decoder = fixed.work
    assert encoder is not None and decoder is not None
    times = filled.of_packs(sizes, 4)
    assert times[0, 1] == pytest.approx(2 * (300 * decoder.linear + 300**2 * decoder.quadratic) / 4)
    assert times[1, 1] == pytest.approx(6 * (100 * decoder.linear + 100**2 * decoder.quadratic) / 4)
    assert times[0, 0] == pytest.approx(2 * (64 * encoder.linear + 64**2 * encoder.quadratic) / 4)
    assert times[1, 0] == pytest.approx(0, abs=1e-12)
    largest = filled.largest_pack(data, 4)
    assert largest[1] == pytest.approx(1200 / LENGTH / 4)
    worst = out_of_memory(profile, plan, data, filled, 10**6)
    enough = replace(plan, cluster=replace(cluster, memory_limit_bytes=worst.worst_bytes))
    assert out_of_memory(profile, enough, data, filled, 10**6).probability == 0
    less = replace(plan, cluster=replace(cluster, memory_limit_bytes=worst.worst_bytes - MIB))
    assert out_of_memory(profile, less, data, filled, 10**6).probability == 1


def test_waiting_grows_with_replicas_and_is_nothing_for_equal_samples() -> None:
    profile = profile_of()
    equal, unequal = data_of([sample(LENGTH, 64)] * 4), data_of(long_tail())
    plan = one_plan(profile, pipeline=1, data=1, batch=32)

    def factor(data: Distribution, layout: Layout, is_balanced: bool = False) -> float:
        return waiting(profile, plan, layout, data, sample_factors(profile, data), is_balanced)

    found = [factor(unequal, Layout(data_size=size)) for size in (1, 2, 8)]
    assert factor(equal, Layout(data_size=8)) == pytest.approx(1)
    assert found[0] == pytest.approx(1, rel=2e-2) and found[0] < found[1] < found[2]
    assert factor(unequal, Layout(data_size=8), is_balanced=True) < found[2]
    assert factor(unequal, Layout(pipeline_size=4)) > 1.1


def test_a_modality_without_samples_is_noted() -> None:
    notes = " ".join(sample_factors(profile_of(), data_of([sample(50), sample(90)])).notes)
    assert "no sample has patches: image_encoder is planned with little or no time" in notes


def test_samples_longer_than_the_measured_one_are_noted_as_extrapolated() -> None:
    profile = profile_of()
    encoder, decoder = profile.model.modules
    short = replace(profile.model, modules=(encoder, replace(decoder, tokens_per_sample=LENGTH // 4)))
    notes = sample_factors(replace(profile, model=short), data_of([sample(LENGTH)])).notes
    assert any(f"measured at {LENGTH // 4} tokens, the longest sample has {LENGTH}" in note for note in notes)
    assert not any("extrapolated" in note for note in sample_factors(profile, data_of([sample(LENGTH)])).notes)


def test_a_scaled_profile_moves_as_many_more_tokens_as_it_computes() -> None:
    """The exchanges of experts are part of the forward, and what a generator receives is what was computed."""
    profile = profile_of()
    measurement, name = profile.measurements[0], profile.model.modules[-1].name
    layer = measurement.modules[name].layer
    layer = replace(layer, forward_exchange_us=layer.forward_us / 4, backward_exchange_us=layer.backward_us / 4)
    module = replace(measurement.modules[name], layer=layer, input_bytes=MIB, rows_bytes=2 * MIB)
    changed = replace(measurement, modules={**measurement.modules, name: module})
    scaled = scaled_profile(
        replace(profile, measurements=(changed,)),
        {1: (dict.fromkeys(changed.modules, 0.1), dict.fromkeys(changed.modules, 3.0))},
    )
    found = scaled.measurements[0].modules[name]
    assert found.layer.forward_exchange_us == pytest.approx(found.layer.forward_us / 4)
    assert found.layer.backward_exchange_us == pytest.approx(found.layer.backward_us / 4)
    assert (found.input_bytes, found.rows_bytes) == (3 * MIB, 6 * MIB)
    assert found.layer.dense == layer.dense
