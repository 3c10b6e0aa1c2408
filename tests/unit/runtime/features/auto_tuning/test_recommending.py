"""Of three recommendations one at least rests on no modelled switch, and those that do say so."""

import argparse
import sys
from pathlib import Path

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.data.distribution import DataSource, make_distribution
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.spread.samples import SpreadOptions
from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant
from mindspeed_autoparallel.planner.tuner.host import HostModel
from mindspeed_autoparallel.planner.tuner.modelled import ExposedParts, Switch, tensor_overlap, with_switches
from mindspeed_autoparallel.planner.tuner.pricing import Prices
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.report.headline import warnings
from mindspeed_autoparallel.report.tuning import render_table
from mindspeed_autoparallel.runtime.features.auto_tuning import by_samples
from mindspeed_autoparallel.runtime.features.auto_tuning import search as recommending
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.planning import SearchPlan
from mindspeed_autoparallel.runtime.features.auto_tuning.verify import reduced_layout, verified_plan
from mindspeed_autoparallel.runtime.features.auto_tuning.write import describe
from mindspeed_autoparallel.runtime.features.sample_data import SampleData
from mindspeed_autoparallel.spec import Cluster, Plan, to_json


def recommend(
    monkeypatch,
    sample_data=None,
    batch=64,
    switches=True,
    sizes=(2, 4, 8),
    micro_batches=(1, 2),
    capacity_mib=60_000,
    **given,
):
    monkeypatch.setattr(recommending, "illegal", lambda arguments, values, world_size: "")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    plain = ProfileVariant(
        name="", settings={}, profile=language_profile(tensor=sizes, batches=micro_batches, capacity_mib=capacity_mib)
    )
    # Every collective is worth half of a layer: with the switch all layouts are faster than any without.
    shown = {
        ("text_decoder", "layer", way): ExposedParts(tensor_us=900, product_us=900) for way in ("forward", "backward")
    }
    parts = {"": {found.at: shown for found in plain.profile.measurements}}
    switch = Switch(
        title="overlap", settings={"tp_comm_overlap": True}, environment={"A": "1"}, change=tensor_overlap(lambda at: 8)
    )
    variants = [plain] if not switches else [plain, *with_switches([plain], [[switch]], [], parts)]
    plan = SearchPlan(
        points=(), variants=(), recompute={}, dimensions=Dimensions(virtual_sizes=(1,)), searched={}, left_out={}
    )
    prices = Prices(base=None, device="", software="", tiers={}, devices_per_node=8, host=HostModel())
    cluster = Cluster(num_nodes=1, devices_per_node=8)
    request = argparse.Namespace(
        num_ranks=8,
        cluster=cluster,
        global_batch_size=batch,
        master_addr="localhost",
        master_port=6000,
        sample_data=sample_data,
        description=argparse.Namespace(model_file=None, content={}),
        work_dir=Path(),
    )
    profiles = argparse.Namespace(variants=variants, plan=plan, costs=argparse.Namespace(prices=prices))
    return recommending.search(request, profiles, argparse.Namespace(num_layers=32, **given))


@pytest.fixture
def recommended(monkeypatch):
    return recommend(monkeypatch)


@pytest.fixture
def picks(recommended):
    return [describe(pick, number) for number, pick in enumerate(recommended.picks, start=1)]


def test_the_last_place_is_for_the_fastest_without_modelled_switches(picks):
    assert [pick["modelled"] for pick in picks] == [["overlap"], ["overlap"], []]
    assert [pick["step_time_ms"] for pick in picks] == sorted(pick["step_time_ms"] for pick in picks)


def test_modelled_ones_have_flags_variables_a_wider_interval_and_a_mark(picks):
    first, last = picks[0], picks[2]
    assert first["command"].startswith("env A=1 torchrun --standalone --nproc-per-node 8 train.py --lr 1")
    assert "--tp-comm-overlap" in first["argv"]
    assert last["command"].startswith("torchrun --standalone --nproc-per-node 8 train.py")

    def width(pick):
        low, high = pick["step_time_interval_ms"]
        return high / low

    assert width(first) > width(last)
    result = {
        "top": picks,
        "notes": [],
        "left_out_dimensions": {},
        "device": "H100",
        "num_device_launches": 0,
        "as_given": {"reason": "unknown"},
        "knowledge": {"covered_time_share": 1.0},
        "launches": [],
        "search": {
            "num_candidates": 1,
            "num_legal": 1,
            "num_solved": 1,
            "num_bounded": 0,
            "num_without_room": 0,
            "seconds": 0.1,
            "lower_bound_ms": 1.0,
        },
    }
    lines = render_table(result).splitlines()
    assert sum("modelled, not measured: overlap" in line for line in lines) == 2


def test_pages_of_slower_configurations_name_the_faster_ones_and_no_page_reports_a_time_limit(recommended):
    plans = [pick.plan for pick in recommended.picks]
    for plan in plans:
        assert sorted(other.step_us for other in plan.alternatives) == sorted(
            other.step.total_us for other in plans if other is not plan
        )
        assert plan.search.lower_bound_us == recommended.outcome.proof.lower_bound_us <= plan.step.total_us
        told = " ".join(warnings(plan))
        assert "stopped before a proof" not in told
        assert ("Another plan is faster: " + plans[0].layout.label() in told) == (plan is not plans[0])


def test_alternatives_hold_the_whole_placement_of_the_other_configurations(monkeypatch):
    plans = [pick.plan for pick in recommend(monkeypatch, **SMALL, capacity_mib=20_000).picks]
    assert any(sum(plan.recomputed_of("text_decoder")) for plan in plans)
    for plan in plans:
        assert len(plan.alternatives) == len(plans) - 1
        for other in plan.alternatives:
            (whole,) = [own for own in plans if own.layout == other.layout and own.step.total_us == other.step_us]
            held = ModulePlacement(
                layers=other.layers, recompute=other.recompute_kinds, prediction_stage=other.prediction_stage
            )
            profile = Profile.parse(whole.extra.costs)
            again = evaluate(profile, whole.cluster, other.layout, held, whole.global_batch_size)
            assert again.stages == whole.stages


def test_the_bound_of_an_alternative_is_that_of_its_layout(recommended):
    first, *rest = recommended.picks
    for pick, other in zip(rest, first.plan.alternatives, strict=True):
        assert other.layout == pick.plan.layout
        assert other.lower_bound_us == pick.found.lower_bound_us <= other.step_us
        assert other.lower_bound_us > recommended.outcome.proof.lower_bound_us


def test_configurations_that_would_end_at_their_first_checkpoint_are_refused(monkeypatch):
    """Megatron's validation takes them: their plans were written, and no training takes these."""
    tied = {"ckpt_format": "torch_dist", "mtp_num_layers": 1, "untie_embeddings_and_output_weights": False}
    free = recommend(monkeypatch, **SMALL, **tied)
    assert any(pick.plan.layout.pipeline_size > 1 for pick in free.picks)
    found = recommend(monkeypatch, **SMALL, **tied, save="out")
    assert {pick.plan.layout.pipeline_size for pick in found.picks} == {1}
    assert all("Megatron fails at the first torch_dist checkpoint" in reason for reason in found.refused.values())


SMALL = {"batch": 16, "switches": False, "sizes": (4, 8), "micro_batches": (1,)}


def samples_of(lengths):
    source = DataSource(
        kind="lengths", files=("x",), sha256="abc", tokens_by="given", num_records=len(lengths), num_read=len(lengths)
    )
    return make_distribution(source, [SampleSize(tokens=length) for length in lengths])


def test_samples_that_differ_reorder_and_say_what_the_spread_costs(monkeypatch):
    long_tail = samples_of([300] * 90 + [2000] * 8 + [4096] * 2)
    options = SpreadOptions(padding="longest", max_oom_probability=1e-3, oom_steps=1000)
    found = recommend(monkeypatch, SampleData(distribution=long_tail, options=options), **SMALL)
    assert len(found.picks) == 3
    records = [pick.plan.data for pick in found.picks]
    assert all(record.oom_probability <= 1e-3 and record.p95_us > record.by_means_us for record in records)
    assert [record.mean_us for record in records[:2]] == sorted(record.mean_us for record in records[:2])
    considered = records[0].considered
    assert records[0].mean_us == min(one.mean_us for one in considered if one.oom_probability <= 1e-3)
    # The spread costs layouts differently: their order is not the one by means.
    assert len({round(one.mean_us / one.by_means_us, 2) for one in considered}) > 1
    first = describe(found.picks[0], 1)
    assert first["step_time_ms"] == first["samples"]["mean_ms"] > first["samples"]["p50_ms"] * 0.5
    assert first["samples"]["p95_ms"] > first["samples"]["p50_ms"]


def test_samples_that_are_all_as_long_as_the_sequence_change_no_figure(monkeypatch):
    options = SpreadOptions(padding="sequence")
    plain = recommend(monkeypatch, **SMALL)
    found = recommend(monkeypatch, SampleData(distribution=samples_of([4096] * 4), options=options), **SMALL)
    assert found.picks[0].plan.layout == plain.picks[0].plan.layout
    assert found.picks[0].plan.data.mean_us == pytest.approx(plain.picks[0].plan.step.total_us)


def test_samples_that_no_configuration_holds_safely_end_with_the_nearest(monkeypatch):
    options = SpreadOptions(padding="longest", max_oom_probability=1e-9, oom_steps=10**6)
    monkeypatch.setattr(by_samples.Judged, "is_safe", False)
    with pytest.raises(InfeasiblePlan, match=r"none of [0-9]+ plans is safe"):
        recommend(monkeypatch, SampleData(distribution=samples_of([300, 4096]), options=options), **SMALL)


def plans_to_verify(found):
    for pick in found.picks:
        for devices in (1, 2, 4, 8):
            if (reduced := reduced_layout(pick.plan.layout, devices)) is not None:
                cluster = Cluster(num_nodes=1, devices_per_node=devices)
                yield pick, verified_plan(pick, cluster, reduced)


def test_processes_that_verify_on_fewer_devices_can_read_their_plan(monkeypatch, recommended):
    """The bound is that of the searched layouts: the step with fewer replicas is shorter or longer."""
    for found in (recommended, recommend(monkeypatch, **SMALL, capacity_mib=20_000)):
        sizes = set()
        for pick, plan in plans_to_verify(found):
            assert Plan.parse(to_json(plan), "plan") == plan
            assert plan.num_microbatches == pick.plan.num_microbatches
            sizes.add(plan.layout.data_size == pick.plan.layout.data_size)
        assert sizes == {False, True}


def test_drawn_samples_are_verified_against_the_mean_drawn_step(monkeypatch):
    options = SpreadOptions(padding="longest", max_oom_probability=1e-3, oom_steps=1000)
    long_tail = SampleData(distribution=samples_of([300] * 90 + [2000] * 8 + [4096] * 2), options=options)
    found = recommend(monkeypatch, long_tail, **SMALL)
    whole = [
        (pick.plan, plan)
        for pick, plan in plans_to_verify(found)
        if plan.layout.data_size == pick.plan.layout.data_size
    ]
    assert len(whole) == 3
    for searched, plan in whole:
        assert plan.mean_us == searched.mean_us > plan.step.total_us
    fewer = [plan for _, plan in plans_to_verify(found) if plan.layout.num_devices < 8]
    assert fewer
    for plan in fewer:
        assert plan.mean_us == plan.data.mean_us != plan.step.total_us
        assert Plan.parse(to_json(plan), "plan") == plan
