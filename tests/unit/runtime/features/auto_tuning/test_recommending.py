"""Of three recommendations one at least rests on no modelled switch, and those that do say so."""

import argparse
import sys

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant
from mindspeed_autoparallel.planner.tuner.host import HostModel
from mindspeed_autoparallel.planner.tuner.modelled import ExposedParts, Switch, tensor_overlap, with_switches
from mindspeed_autoparallel.planner.tuner.pricing import Prices
from mindspeed_autoparallel.report.headline import warnings
from mindspeed_autoparallel.report.tuning import render_table
from mindspeed_autoparallel.runtime.features.auto_tuning import recommend as recommending
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.planning import SearchPlan
from mindspeed_autoparallel.runtime.features.auto_tuning.output import describe
from mindspeed_autoparallel.spec import Cluster


@pytest.fixture
def recommended(monkeypatch):
    monkeypatch.setattr(recommending, "illegal", lambda arguments, values, world_size: "")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    plain = ProfileVariant(name="", settings={}, profile=language_profile(tensor=(2, 4, 8), batches=(1, 2)))
    # Every collective is worth half of a layer: with the switch all layouts are faster than any without.
    shown = {
        ("text_decoder", "layer", way): ExposedParts(tensor_us=900, product_us=900) for way in ("forward", "backward")
    }
    parts = {"": {found.at: shown for found in plain.profile.measurements}}
    switch = Switch(
        title="overlap", settings={"tp_comm_overlap": True}, environment={"A": "1"}, change=tensor_overlap(lambda at: 8)
    )
    variants = [plain, *with_switches([plain], [[switch]], [], parts)]
    plan = SearchPlan(
        points=(), ways=(), recompute={}, dimensions=Dimensions(virtual_sizes=(1,)), searched={}, left_out={}
    )
    prices = Prices(base=None, device="", software="", tiers={}, devices_per_node=8, host=HostModel())
    cluster = Cluster(num_nodes=1, devices_per_node=8)
    request = argparse.Namespace(
        num_ranks=8, cluster=cluster, global_batch_size=64, master_addr="localhost", master_port=6000
    )
    profiles = argparse.Namespace(variants=variants, plan=plan, costs=argparse.Namespace(prices=prices))
    return recommending.recommend(request, profiles, argparse.Namespace(num_layers=32))


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


def test_pages_of_the_others_name_the_faster_ones_and_no_page_says_that_time_ran_out(recommended):
    plans = [pick.plan for pick in recommended.picks]
    for plan in plans:
        assert sorted(other.step_us for other in plan.alternatives) == sorted(
            other.step.total_us for other in plans if other is not plan
        )
        assert plan.search.lower_bound_us == recommended.outcome.proof.lower_bound_us <= plan.step.total_us
        told = " ".join(warnings(plan))
        assert "stopped before a proof" not in told
        assert ("Another plan is faster: " + plans[0].layout.label() in told) == (plan is not plans[0])
