"""A plan edited by hand: right edits are predicted, wrong ones are named, exit code 2, no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan, to_json

Json = dict[str, Any]


@pytest.fixture(scope="module")
def plan() -> Plan:
    cluster, layout = Cluster(num_nodes=1, devices_per_node=4), Layout(pipeline_size=2, tensor_size=2)
    return search(small_profile(capacity_mib=330), cluster, 16, SearchOptions(layouts=[layout]))


def _simulated(value: Json, folder: Path, *more: str) -> int:
    (folder / "plan.json").write_text(json.dumps(value))
    return main(["simulate", "--plan", str(folder / "plan.json"), *more])


def _answer(value: Json, folder: Path, capsys: pytest.CaptureFixture[str]) -> Json:
    assert _simulated(value, folder, "--json") == 0
    answer: Json = json.loads(capsys.readouterr().out)
    return answer


def test_a_layer_moved_by_hand_is_predicted(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = to_json(plan)
    first, second = value["stages"]
    assert first["layers"]["text_decoder"] + second["layers"]["text_decoder"] == 4
    other, moved = (first, second) if second["layers"]["text_decoder"] > 1 else (second, first)
    other["layers"]["text_decoder"] += 1
    moved["layers"]["text_decoder"] -= 1
    moved["recompute"], other["recompute"] = {}, {}
    answer = _answer(value, tmp_path, capsys)
    # The search found the best split: any other is slower, or does not fit.
    assert answer["step_time_ms"] > answer["planned_step_time_ms"] or not answer["fits"]
    assert [stage["layers"] for stage in answer["stages"]] == [stage["layers"] for stage in value["stages"]]


def test_recomputation_added_by_hand_costs_time_and_saves_memory(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _answer(to_json(plan), tmp_path, capsys)
    value = to_json(plan)
    for stage in value["stages"]:
        stage["recompute"] = {name: {"full": count} for name, count in stage["layers"].items() if count}
    after = _answer(value, tmp_path, capsys)
    assert after["step_time_ms"] > before["step_time_ms"] == before["planned_step_time_ms"]
    assert after["peak_memory_mib"][0] < before["peak_memory_mib"][0]


def test_less_memory_by_hand_does_not_fit(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = to_json(plan)
    value["cluster"]["memory_limit_bytes"] = 1000
    assert _answer(value, tmp_path, capsys)["fits"] is False


def test_the_timeline_holds_every_operation(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _simulated(to_json(plan), tmp_path, "--trace", str(tmp_path / "trace.json")) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    operations = 2 * plan.num_microbatches * plan.layout.num_virtual_stages
    assert len(complete) >= operations
    assert max(event["ts"] + event["dur"] for event in complete) <= plan.step.total_us * (1 + 1e-9)
    assert "fits: yes" in capsys.readouterr().out


def _set(*path: Any) -> Callable[[Json], None]:
    *keys, last, new = path

    def edit(value: Any) -> None:
        for key in keys:
            value = value[key]
        value[last] = new

    return edit


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        (_set("stages", 0, "recompute", {"text_decoder": {"full": 99}}), "recomputes 99"),
        (_set("stages", 0, "recompute", {"text_decoder": {"magic": 0}}), "magic"),
        (_set("stages", 1, "recompute", {"text_decoder": {"selective": 1}}), "selective"),
        (_set("stages", 0, "layers", "text_decoder", 77), "77"),
        (_set("stages", 0, "layers", "text_decoder", -1), "layers"),
        (_set("stages", 0, "layers", "audio", 1), "audio"),
        (_set("stages", []), "0 stages"),
        (_set("layout", "pipeline_size", 4), "4"),
        (_set("layout", "data_size", 2), "devices"),
        (_set("layout", "schedule", "zigzag"), "zigzag"),
        (_set("num_microbatches", 3), "num_microbatches"),
        (_set("global_batch_size", 0), "num_microbatches"),
        (_set("cluster", "memory_limit_bytes", 0), "memory limit"),
        (_set("stages", 0, "forward_us", -1.0), "must be 0 to"),
        (_set("stages", 0, "forward_us", float("nan")), "finite"),
        (_set("surprise", 1), "surprise"),
        (_set("extra", {}), "costs"),
        (_set("extra", "costs", "{"), "expected an object"),
    ],
)
def test_a_wrong_edit_is_named(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[Json], None], word: str
) -> None:
    value = to_json(plan)
    edit(value)
    assert _simulated(value, tmp_path) == 2
    error = capsys.readouterr().err
    assert word in error
    assert "Traceback" not in error


def test_a_plan_file_holds_no_json_as_text(plan: Plan) -> None:
    value = to_json(plan)
    assert not any(isinstance(item, str) for item in value["extra"].values())
    assert Profile.parse(value["extra"]["costs"], "costs").measurements
    assert Plan.parse(value) == plan


def test_a_stage_left_empty_by_hand_is_named(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = to_json(plan)
    first, second = value["stages"]
    for name in first["layers"]:
        second["layers"][name] += first["layers"][name]
        first["layers"][name] = 0
    first["recompute"] = {}
    assert _simulated(value, tmp_path) == 2
    assert "stage 0" in capsys.readouterr().err


def test_after_an_edit_nothing_is_called_proved(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _simulated(to_json(plan), tmp_path) == 0
    assert "; proved optimal in" in capsys.readouterr().out
    value = to_json(plan)
    for stage in value["stages"]:
        stage["recompute"] = {name: {"full": count} for name, count in stage["layers"].items() if count}
    assert _simulated(value, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "edited by hand" in printed
    assert not any(word in printed for word in ("optimal", "bound", "even split", "greedy split", "faster per sample"))


def test_a_limit_changed_by_hand_is_an_edit(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = to_json(plan)
    value["cluster"]["memory_limit_bytes"] = 2**40
    assert _simulated(value, tmp_path) == 0
    assert "edited by hand" in capsys.readouterr().out
