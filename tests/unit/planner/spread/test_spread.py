"""Plans for data whose samples differ: steps, memory, choice, and the command."""

from __future__ import annotations

import functools
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from small_profile import small_profile

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.data.distribution import DataSource, Distribution, make_distribution
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner import wanted as composition
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.results import result_of
from mindspeed_autoparallel.planner.spread import choose
from mindspeed_autoparallel.planner.spread.choose import SpreadOptions, choose_plan
from mindspeed_autoparallel.planner.spread.drawn_steps import PlanUnderData
from mindspeed_autoparallel.planner.spread.draws import draw_batches
from mindspeed_autoparallel.planner.spread.factors import sample_factors
from mindspeed_autoparallel.planner.spread.memory import out_of_memory
from mindspeed_autoparallel.planner.spread.rank_bytes import rank_bytes, windows
from mindspeed_autoparallel.planner.spread.scaled import mean_profile, scaled_profile
from mindspeed_autoparallel.planner.spread.waiting import waiting
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.report import render_table
from mindspeed_autoparallel.report.answer import answer_of
from mindspeed_autoparallel.report.headline import headline, warnings
from mindspeed_autoparallel.report.search_data import baselines
from mindspeed_autoparallel.schedule import make_program
from mindspeed_autoparallel.spec import Cluster, Layout, Plan
from mindspeed_autoparallel.units import MIB, format_bytes, format_us

LENGTH = 1024


def data_of(samples: list[SampleSize], num_records: int = 0) -> Distribution:
    source = DataSource(
        kind="records",
        files=("x",),
        sha256="abc",
        tokens_by="given",
        num_records=max(num_records, len(samples)),
        num_read=len(samples),
    )
    return make_distribution(source, samples)


def sample(tokens: int, patches: int = 0) -> SampleSize:
    return SampleSize(tokens=tokens, images=min(patches, 1), patches=patches, squared_patches=patches**2)


def profile_of(capacity_mib: int = 2000) -> Profile:
    """An encoder measured with 64 patches, a decoder measured with 1,024 tokens."""
    profile = small_profile(capacity_mib=capacity_mib)
    encoder, decoder = profile.model.modules
    modules = (
        replace(encoder, tokens_per_sample=64, hidden_size=512),
        replace(decoder, tokens_per_sample=LENGTH, hidden_size=512),
    )
    return replace(profile, model=replace(profile.model, modules=modules, sequence_length=LENGTH))


def long_tail(number: int = 400, seed: int = 3) -> list[SampleSize]:
    draw = numpy.random.default_rng(seed)
    tokens = numpy.clip(draw.lognormal(5, 1, number), 8, LENGTH).astype(int)
    return [sample(int(size), int(size) // 16 * 4) for size in tokens]


def searched(cluster: Cluster, batch: int, **options: Any):
    def run(profile: Profile, layouts: list[Layout] | None) -> Plan:
        return search(
            profile, cluster, batch, SearchOptions(layouts=layouts, with_relaxations=False, num_workers=1, **options)
        )

    return run


def one_plan(profile: Profile, pipeline: int = 2, data: int = 2, batch: int = 16) -> Plan:
    cluster = Cluster(num_nodes=1, devices_per_node=pipeline * data)
    return search(
        profile,
        cluster,
        batch,
        SearchOptions(layouts=[Layout(pipeline_size=pipeline, data_size=data)], with_relaxations=False, num_workers=1),
    )


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


def test_the_chosen_plan_is_the_fastest_safe_one_of_those_drawn() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=8)
    data = data_of(long_tail())
    loose = choose_plan(profile_of(), data, SpreadOptions(), searched(cluster, 32))
    assert loose.data is not None and len(loose.data.considered) >= 4
    assert loose.data.mean_us == min(one.mean_us for one in loose.data.considered)
    assert loose.data.mean_us > loose.data.by_means_us and loose.data.balanced_mean_us < loose.data.mean_us
    balanced = choose_plan(profile_of(), data, SpreadOptions(is_balanced=True), searched(cluster, 32))
    assert balanced.data is not None and balanced.data.mean_us <= loose.data.balanced_mean_us
    assert Plan.parse(json.loads(json.dumps(_as_json(loose)))) == loose


def test_as_many_alternatives_as_asked_for_are_listed() -> None:
    cluster, data = Cluster(num_nodes=1, devices_per_node=8), data_of(long_tail())
    one, many = (choose_plan(profile_of(), data, SpreadOptions(top_k=k), searched(cluster, 32)) for k in (1, 5))
    assert len(one.alternatives) == 1 and len(many.alternatives) > 3
    assert many.alternatives[:1] == one.alternatives


@functools.cache
def chosen(devices: int, batch: int, share: float) -> tuple[Cluster, Plan, Plan]:
    """Return a cluster, the plan of the mean sample with all its memory, and the plan of the data with a ``share`` of what
    that needs, or all if 0."""
    cluster, profile, data = Cluster(num_nodes=1, devices_per_node=devices), profile_of(), data_of(long_tail())
    at_mean = searched(cluster, batch)(mean_profile(profile, data, sample_factors(profile, data)), None)
    if share:
        needed = out_of_memory(profile, at_mean, data, sample_factors(profile, data), 1000).worst_bytes
        cluster = replace(cluster, memory_limit_bytes=int(share * needed))
    return cluster, at_mean, choose_plan(profile, data, SpreadOptions(oom_steps=1000), searched(cluster, batch))


@pytest.mark.parametrize(("devices", "batch", "share"), [(8, 32, 0.0), (4, 16, 0.8)])
def test_alternatives_are_the_next_best_layouts_by_drawn_steps_whichever_layout_wins(
    devices: int, batch: int, share: float
) -> None:
    """With little memory, the mean sample's layout has no safe plan."""
    _, at_mean, plan = chosen(devices, batch, share)
    assert plan.data is not None and (plan.layout == at_mean.layout) == (not share)
    others = plan.alternatives
    assert len(others) >= 2 and plan.layout not in [other.layout for other in others]
    steps = [plan.mean_us, *(other.step_us for other in others)]
    assert steps == sorted(steps)
    for other in others:
        safe = [one for one in plan.data.considered if one.oom_probability <= 1e-3]
        assert other.step_us == min(one.mean_us for one in safe if one.label == other.layout.label())
        assert other.lower_bound_us is None  # the search bounds steps of the mean sample, not means of drawn ones
    # The record is of the whole search: a plan slower than another for the mean sample is not optimal.
    assert plan.search.num_configurations == at_mean.search.num_configurations
    assert plan.search.lower_bound_us <= at_mean.step.total_us * (1 + 1e-9)
    assert (plan.search.status == "optimal") == (not share)
    assert not any("Another plan is faster" in line for line in warnings(plan))
    assert Plan.parse(json.loads(plan.text())) == plan


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


def test_a_tight_memory_changes_the_plan() -> None:
    data, profile = data_of(long_tail()), profile_of()
    factors = sample_factors(profile, data)
    tight, _, found = chosen(4, 16, 0.8)
    assert found.data is not None and found.data.oom_probability <= 1e-3
    assert max(one.oom_probability for one in found.data.considered) > 1e-3
    # No slower than what holds the largest microbatches everywhere: of what is safe the fastest is looked for.
    for_the_largest = searched(tight, 16)(mean_profile(profile, data, factors, 1.0), None)
    drawn = PlanUnderData(profile, for_the_largest, factors).drawn(data).in_order
    assert found.data.mean_us <= float(drawn.mean()) * (1 + 1e-9)
    with pytest.raises(InfeasiblePlan, match=r"none of|nothing fits|no plan"):
        choose_plan(
            profile, data, SpreadOptions(oom_steps=1000), searched(replace(tight, memory_limit_bytes=60 * MIB), 16)
        )


def test_where_nothing_is_safe_the_longest_sample_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose.Judged, "is_safe", False)
    data = data_of([sample(100), sample(900)])
    data = replace(data, source=replace(data.source, longest_record="set.json[7]"))
    cluster = Cluster(num_nodes=1, devices_per_node=2)
    with pytest.raises(InfeasiblePlan, match=r"The longest sample \(set.json\[7\]\) has 900 tokens"):
        choose_plan(profile_of(), data, SpreadOptions(), searched(cluster, 4))


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


def _as_json(plan: Plan) -> Any:
    from mindspeed_autoparallel.spec import to_json

    return to_json(plan)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    profile_of().write(tmp_path / "profile.json")
    data_of(long_tail()).write(tmp_path / "data.json")
    return tmp_path


def plan_command(files: Path, *flags: str) -> int:
    sizes = ["--nnodes", "1", "--nproc-per-node", "4", "--global-batch-size", "16", "--num-workers", "1"]
    return main(["plan", "--profile", str(files / "profile.json"), *sizes, *flags])


def test_the_command_prints_the_cost_of_the_spread(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(files, "--data", str(files / "data.json"), "--out", str(files)) == 0
    printed = capsys.readouterr().out
    for words in ("the spread costs", "would help: rearranged", "chance to run out of memory", "considered: "):
        assert words in printed
    plan = Plan.read(files / "plan.json")
    assert plan.data is not None and plan.data.sha256 == "abc"
    assert main(["report", "--plan", str(files / "plan.json"), "--page", str(files / "page.html")]) == 0
    page = (files / "page.html").read_text()
    assert "The spread costs" in page and "means of drawn steps" in page and "for the mean sample" in page
    capsys.readouterr()
    assert main(["simulate", "--plan", str(files / "plan.json")]) == 0


def test_reports_show_the_mean_of_drawn_steps_by_which_plans_are_compared() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=8)
    data = data_of(long_tail())
    plan = choose_plan(profile_of(), data, SpreadOptions(), searched(cluster, 32))
    assert plan.data is not None and plan.mean_us > 1.05 * plan.step.total_us
    head, answer, result = headline(plan), answer_of(plan), result_of(plan)
    assert answer.step_us == plan.mean_us == 1000 * result["e2e_time"]
    assert (head.p50_us, head.p95_us) == (plan.data.p50_us, plan.data.p95_us)
    # Tokens of the samples, of which the model's length is only the most.
    tokens = float(data.sizes()[:, 0] @ data.shares())
    assert tokens < plan.model.sequence_length / 2
    for rate in (answer.tokens_per_s_per_device, result["throughput"]):
        assert rate == pytest.approx(32 * tokens / (plan.mean_us / 1e6) / 8)
    assert answer.mfu is None
    worst = f"; {format_bytes(plan.data.worst_bytes)} on rank {plan.data.worst_rank} with the heaviest samples"
    assert answer.memory.endswith(f" free, for the mean sample{worst}")
    # Rules of thumb are not drawn: they are compared at the mean sample, as their bound is.
    assert baselines(plan)[0].step_us == plan.step.total_us
    assert ", for the mean sample" in head.proof
    table = render_table(plan)
    assert f"step {format_us(plan.mean_us)} predicted, the mean of drawn steps, " in table


@pytest.mark.parametrize("limit_s", [40.0, 4.0])
def test_the_time_limit_holds_for_all_searches_of_drawn_data_together(monkeypatch: Any, limit_s: float) -> None:
    real, used, given = time.monotonic, [0.0], []

    def search_to_the_limit(
        profile: Profile, cluster: Cluster, batch: int, options: SearchOptions, *, progress: Any
    ) -> Plan:
        given.append(options.time_limit_s)
        found = search(profile, cluster, batch, replace(options, time_limit_s=60))
        used[0] += options.time_limit_s
        return found

    monkeypatch.setattr(time, "monotonic", lambda: real() + used[0])
    monkeypatch.setattr(composition, "search", search_to_the_limit)
    options = SearchOptions(time_limit_s=limit_s, with_relaxations=False, num_workers=1)
    cluster, data = Cluster(num_nodes=1, devices_per_node=8), data_of(long_tail())
    training = composition.Wanted(
        cluster=cluster, global_batch_size=32, options=options, data=(data, SpreadOptions(is_balanced=True))
    )
    plan = composition.find_plan(profile_of(), training)
    assert isinstance(plan, Plan) and plan.data is not None
    assert given[0] == pytest.approx(limit_s / 2, abs=0.5)
    # A search gets a second at least; in time for one only, layouts after the first safe one are not drawn.
    assert sum(given) <= limit_s + 5
    assert any("time limit" in note for note in plan.data.notes) == (limit_s < 10)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data-balance",), "--data-balance needs --data"),
        (("--max-oom-probability", "nan", "--oom-steps", "-5"), "--max-oom-probability, --oom-steps need --data"),
        (("--data-padding", "none"), "--data-padding needs --data"),
        (
            ("--data", "DATA", "--data-pack-length", "900"),
            "--data-pack-length must be at least 1 and needs --data-padding none",
        ),
        (
            ("--data", "DATA", "--data-pack-length", "100", "--data-padding", "none", "--data-balance"),
            "fits in no pack of 100",
        ),
        (("--data", "DATA", "--max-oom-probability", "0"), "--max-oom-probability must be above 0"),
        (("--data", "DATA", "--oom-steps", "0"), "--oom-steps must be at least 1"),
        (("--data", "PROFILE"), "is not a data distribution"),
        (("--data", "DATA", "--mm-data", "SET"), "has other records (sha256 abc)"),
    ],
)
def test_bad_input_is_one_line(
    files: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    (files / "records.json").write_text('[{"messages": []}]')
    parameters = {"basic_parameters": {"dataset": str(files / "records.json")}}
    (files / "set.json").write_text(json.dumps({"dataset_param": parameters}))
    names = {"DATA": "data.json", "PROFILE": "profile.json", "SET": "set.json"}
    given = [str(files / names[flag]) if flag in names else flag for flag in flags]
    assert plan_command(files, *given) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_longer_samples_than_the_profiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="the longest sample has 5000 tokens, the profile's sequences 1024"):
        sample_factors(profile_of(), data_of([sample(5000)]))
