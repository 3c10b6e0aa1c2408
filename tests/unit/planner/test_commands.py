"""The plan and simulate commands: files, exit codes, what-if by editing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exit_codes import exit_code
from small_profile import small_profile

from mindspeed_autoparallel.cli._launch import flags_line
from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.results import RESULT_FILE, result_of
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Plan


@pytest.fixture
def profile() -> Profile:
    return small_profile()


@pytest.fixture
def plan_file(profile: Profile, tmp_path: Path) -> Path:
    profile.write(tmp_path / "profile.json")
    arguments = ["--nnodes", "1", "--nproc-per-node", "4", "--global-batch-size", "16", "--out", str(tmp_path)]
    assert main(["plan", "--profile", str(tmp_path / "profile.json"), "--json", *arguments]) == 0
    return tmp_path / "plan.json"


def test_a_folder_for_the_files_is_made_and_a_file_in_its_place_is_named(
    profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write(tmp_path / "profile.json")
    arguments = ["plan", "--profile", str(tmp_path / "profile.json"), "--nnodes", "1", "--nproc-per-node", "4"]
    arguments += ["--global-batch-size", "16", "--json", "--out"]
    assert main([*arguments, str(tmp_path / "new ü" / "folder")]) == 0
    assert (tmp_path / "new ü" / "folder" / "plan.json").is_file()
    capsys.readouterr()
    assert main([*arguments, str(tmp_path / "profile.json")]) == 2
    assert "--out" in capsys.readouterr().err


def _simulate(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["simulate", "--plan", str(path), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_result_file_has_the_known_keys_and_lists_of_pipeline_length(plan_file: Path) -> None:
    result = json.loads((plan_file.parent / RESULT_FILE).read_text())
    plan = Plan.read(plan_file)
    assert list(result) == [
        "schema_version",
        "parallel_config",
        "layer_placement",
        "layer_recompute",
        "e2e_time",
        "throughput",
    ]
    assert list(result["parallel_config"]) == ["PP", "TP", "DP", "MBS"]
    assert list(result["layer_placement"]) == ["vit_layer_placement", "llm_layer_placement"]
    assert list(result["layer_recompute"]) == ["vit_layer_recompute", "llm_layer_recompute"]
    lists = [*result["layer_placement"].values(), *result["layer_recompute"].values()]
    assert {len(row) for row in lists} == {result["parallel_config"]["PP"]}
    assert sum(result["layer_placement"]["llm_layer_placement"]) == 4
    assert result["e2e_time"] == plan.step.total_us / 1000
    tokens = 16 * 128
    assert result["throughput"] == pytest.approx(tokens / (result["e2e_time"] / 1000) / 4)


def test_sizes_beside_the_four_appear_where_they_are_above_one(profile: Profile) -> None:
    plan = search(profile, Cluster(num_nodes=1, devices_per_node=2), 8)
    assert "VPP" not in result_of(plan)["parallel_config"]


def test_reported_step_time_equals_replay_of_the_same_plan(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _simulate(plan_file, capsys)
    assert result["step_time_ms"] == result["planned_step_time_ms"]
    assert result["fits"]


def test_edited_batch_changes_the_step_and_an_edited_stage_time_counts(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = json.loads(plan_file.read_text())
    value["global_batch_size"] *= 2
    value["num_microbatches"] *= 2
    plan_file.write_text(json.dumps(value))
    longer = _simulate(plan_file, capsys)
    assert longer["step_time_ms"] > longer["planned_step_time_ms"]
    value["stages"][0]["forward_us"] += 1000.0
    plan_file.write_text(json.dumps(value))
    assert _simulate(plan_file, capsys)["step_time_ms"] > longer["step_time_ms"]


def test_critical_path_adds_up_to_the_pipeline(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _simulate(plan_file, capsys)
    steps = sum(size for _, size in result["critical_path"])
    assert steps == pytest.approx(result["step"]["pipeline_us"])


def test_plan_edited_to_hold_too_few_layers_is_refused(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(plan_file.read_text())
    value["stages"][0]["layers"]["text_decoder"] = 0
    value["stages"][0]["recompute"] = {}
    plan_file.write_text(json.dumps(value))
    assert main(["simulate", "--plan", str(plan_file)]) == 2
    assert "Error" in capsys.readouterr().err


@pytest.mark.parametrize("duration_us", [-1e308, -1.0, 1e13])
def test_stage_times_that_no_stage_takes_are_refused(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], duration_us: float
) -> None:
    value = json.loads(plan_file.read_text())
    value["stages"][0]["backward_us"] = duration_us
    plan_file.write_text(json.dumps(value))
    assert main(["report", "--plan", str(plan_file), "--page", str(tmp_path / "page.html")]) == 2
    assert "stage 0: backward_us must be 0 to 1e+12" in capsys.readouterr().err


def test_one_of_two_quantiles_is_refused(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(plan_file.read_text())
    value["step"]["p95_us"] = 1.0
    plan_file.write_text(json.dumps(value))
    assert main(["report", "--plan", str(plan_file)]) == 2
    assert "p50_us and step.p95_us belong together" in capsys.readouterr().err


def test_a_memory_limit_of_nothing_is_refused(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = json.loads(plan_file.read_text())
    value["memory"][0]["limit_bytes"] = 0
    plan_file.write_text(json.dumps(value))
    assert main(["report", "--plan", str(plan_file), "--page", str(tmp_path / "page.html")]) == 2
    assert "a limit is at least 1" in capsys.readouterr().err


def test_infeasible_is_exit_code_three_with_a_reason(
    profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write(tmp_path / "profile.json")
    arguments = ["plan", "--profile", str(tmp_path / "profile.json"), "--nnodes", "1", "--nproc-per-node", "2"]
    arguments += ["--global-batch-size", "4", "--memory-limit-mib", "30"]
    assert main([*arguments, "--json"]) == 3
    assert "iB too much" in json.loads(capsys.readouterr().out)["reason"]
    assert main(arguments) == 3


@pytest.mark.parametrize(
    "change", [["--memory-limit-mib", "0"], ["--global-batch-size", "0"], ["--nnodes", "0"], ["--time-limit-s", "-1"]]
)
def test_bad_numbers_are_exit_code_two(profile: Profile, tmp_path: Path, change: list[str]) -> None:
    profile.write(tmp_path / "profile.json")
    arguments = ["plan", "--profile", str(tmp_path / "profile.json"), "--nnodes", "1", "--nproc-per-node", "2"]
    assert exit_code([*arguments, "--global-batch-size", "4", *change]) == 2


def test_mindspeed_profile_is_planned_at_its_own_tensor_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("vit_pre", "vit", "vit_post", "llm_pre", "llm", "llm_post")
    value: dict[str, Any] = {
        name: {"fwd_time": 4.0, "bwd_time": 8.0, "act_mem": 100.0, "module_param": [100.0, 300.0, 100.0]}
        for name in names
    }
    value["image_encoder"] = {"vision_encoder": {"num_layers": 3}}
    value["text_decoder"] = {"num_layers": 5, "hidden_size": 1024, "seq_length": 256}
    value["micro_batch_size"] = 1
    (tmp_path / "model_profile.json").write_text(json.dumps(value))
    arguments = ["plan", "--profile", str(tmp_path / "model_profile.json"), "--nnodes", "1", "--nproc-per-node", "8"]
    arguments += ["--global-batch-size", "16", "--profile-tensor-size", "2", "--json"]
    assert main(arguments) == 0
    plan = Plan.parse(json.loads(capsys.readouterr().out))
    assert plan.layout.tensor_size == 2
    assert plan.layout.micro_batch_size == 1
    assert plan.search.status == "optimal"


def test_a_plan_without_flags_gets_no_advice_to_search_again(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "docs" / "examples" / "model_profile.json"
    words = ["plan", "--profile", str(example), "--profile-tensor-size", "8", "--nnodes", "4", "--nproc-per-node", "8"]
    assert main([*words, "--global-batch-size", "8", "--json"]) == 0
    line = flags_line(Plan.parse(json.loads(capsys.readouterr().out)))
    assert line.startswith("no flags of") and "Search it again" not in line
