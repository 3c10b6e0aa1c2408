"""Reports of a plan that the planner itself made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.profiles import read_profile
from mindspeed_autoparallel.report import chrome_trace, render_page, render_table, report_data
from mindspeed_autoparallel.report.replay import replay
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.spec.plan import Plan


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    block = {"fwd_time": 2, "bwd_time": 4, "act_mem": 100, "module_param": [10, 60, 20]}
    names = ("vit_pre", "vit", "vit_post", "llm_pre", "llm", "llm_post")
    path = tmp_path_factory.mktemp("profile") / "model_profile.json"
    path.write_text(
        json.dumps(
            {
                **dict.fromkeys(names, block),
                "image_encoder.vision_encoder.num_layers": 4,
                "text_decoder": {"num_layers": 8, "seq_length": 1024, "hidden_size": 1024},
                "micro_batch_size": 1,
                "grad_acc_step": 8,
            }
        )
    )
    # Little enough memory that one device cannot hold the model.
    cluster = Cluster(num_nodes=1, devices_per_node=4, memory_limit_bytes=1100 * 1024**2)
    return search(read_profile(path), cluster, 8, SearchOptions(time_limit_s=60.0))


def test_timeline_is_the_planners_replay(plan: Plan) -> None:
    assert plan.layout.pipeline_size > 1
    found = replay(plan)
    assert not found.inferred
    assert found.step.step_time == pytest.approx(plan.step.pipeline_us, rel=1e-9)
    assert report_data(plan).timeline.end_us == pytest.approx(plan.step.pipeline_us, rel=1e-9)


def test_broken_costs_fall_back_to_inferred_messages(plan: Plan) -> None:
    broken = replace(plan, extra=replace(plan.extra, costs={"device": 7}))
    found = replay(broken)
    assert found.inferred
    assert found.step.step_time == pytest.approx(plan.step.pipeline_us, rel=1e-5)
    says = "inferred from the predicted time"
    assert says in render_page(broken) and says not in render_page(plan)


def test_the_time_of_a_pass_outside_the_blocks_is_noted_beside_the_stages(plan: Plan) -> None:
    costs = plan.extra.costs
    costs = {**costs, "device": {**costs["device"], "operation_overhead_us": 17_000.0}}
    slow = replace(plan, extra=replace(plan.extra, costs=costs))
    assert "Every forward and backward takes 17.0 ms more" in render_page(slow)
    assert "outside of the blocks" not in render_page(plan)


def test_every_view_is_drawn(plan: Plan) -> None:
    assert f"{plan.layout.label()} for " in render_table(plan)
    assert len([e for e in chrome_trace(plan)["traceEvents"] if e["ph"] == "X"]) >= 2 * plan.num_microbatches


def test_file_in_between_changes_nothing(plan: Plan, tmp_path: Path) -> None:
    plan.write(tmp_path / "plan.json")
    assert report_data(Plan.read(tmp_path / "plan.json")) == report_data(plan)
