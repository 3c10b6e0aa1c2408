"""Microbatches that differ, from the profile's file to the printed plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles import Profile, VariableData
from mindspeed_autoparallel.spec import Cluster, Layout, Plan

ARGUMENTS = ("--nnodes", "1", "--nproc-per-node", "2", "--global-batch-size", "8")


def _varying(*factors: float) -> Profile:
    return small_profile(variable_data=VariableData(modules=("image_encoder",), samples=tuple((f,) for f in factors)))


def test_mean_and_percentiles_reach_the_plan_file_and_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _varying(0.2, 0.4, 1.0, 2.4).write(tmp_path / "profile.json")
    command = ["plan", "--profile", str(tmp_path / "profile.json"), *ARGUMENTS, "--out", str(tmp_path)]
    assert main([*command, "--json"]) == 0
    plan = Plan.parse(json.loads(capsys.readouterr().out))
    assert plan.step.p50_us is not None and plan.step.p95_us is not None
    assert plan.step.p50_us < plan.step.p95_us
    assert plan.search.lower_bound_us <= plan.step.total_us <= plan.step.p95_us
    assert main(command) == 0
    assert "P95" in capsys.readouterr().out
    assert main(["simulate", "--plan", str(tmp_path / "plan.json"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step"]["p95_us"] == plan.step.p95_us
    assert again["step_time_ms"] == again["planned_step_time_ms"]


def test_constant_samples_are_the_constant_profile() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=2)
    constant, sampled = search(small_profile(), cluster, 8), search(_varying(1.0, 1.0), cluster, 8)
    assert sampled.step.total_us == pytest.approx(constant.step.total_us)
    assert sampled.step.p50_us == sampled.step.p95_us == pytest.approx(constant.step.total_us)
    assert sampled.stages == constant.stages


def test_the_reported_time_is_the_mean_over_what_varies_not_the_step_of_mean_times() -> None:
    """Encoder on one stage, decoder on the other: whichever microbatch is heavy holds up the pipeline."""
    cluster, layout = Cluster(num_nodes=1, devices_per_node=2), Layout(pipeline_size=2)
    placement = ModulePlacement(
        layers={"image_encoder": (2, 0), "text_decoder": (0, 4)}, recompute={"image_encoder": {}, "text_decoder": {}}
    )
    calm, wild = (evaluate(_varying(*f), cluster, layout, placement, 8).step for f in ((8.0, 8.0), (1.0, 15.0)))
    assert wild.total_us > calm.total_us
    assert wild.p95_us is not None and wild.p95_us > wild.total_us
    assert calm.p95_us == pytest.approx(calm.total_us)


def test_heavier_encoders_move_layers_to_the_decoder_stages() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=2)
    light, heavy = (
        search(_varying(*factors), cluster, 8, SearchOptions(layouts=[Layout(pipeline_size=2)]))
        for factors in ((0.1, 0.3), (3.0, 9.0))
    )
    assert light.layers_of("text_decoder")[0] > heavy.layers_of("text_decoder")[0]


def test_many_samples_are_represented_by_few_with_nearly_their_mean() -> None:
    from mindspeed_autoparallel.planner.variable_data import MAX_REPRESENTATIVES, mean_factors, representatives

    samples = tuple((0.5 + index / 1000,) for index in range(1000))
    data = VariableData(modules=("image_encoder",), samples=samples)
    assert len(representatives(data)) == MAX_REPRESENTATIVES
    assert mean_factors(data)["image_encoder"] == pytest.approx(sum(row[0] for row in samples) / 1000, rel=0.01)
    assert mean_factors(replace(data, samples=samples[:3]))["image_encoder"] == pytest.approx(0.501)
