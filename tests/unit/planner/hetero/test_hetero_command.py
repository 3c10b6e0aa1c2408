"""``plan --hetero-parallel``: files, exit codes, comparison, what-if on the written plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner import wanted
from mindspeed_autoparallel.planner.hetero.backbone import backbone_profile
from mindspeed_autoparallel.planner.results import RESULT_FILE
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.units import MIB


def encoder_bound(capacity_mib: int) -> Profile:
    """An encoder that takes long and gains little by TP, before a backbone whose state needs TP or PP."""
    profile = small_profile(capacity_mib=capacity_mib)
    measurements = []
    for m in profile.measurements:
        tensor = m.at.tensor_size
        image, text = m.modules["image_encoder"], m.modules["text_decoder"]
        slower = 6.0 * tensor / (1.05 if tensor > 1 else 1.0)
        layer = replace(
            image.layer, forward_us=image.layer.forward_us * slower, backward_us=image.layer.backward_us * slower
        )
        state = replace(
            text.layer.dense,
            parameter_bytes=40 * MIB // tensor,
            gradient_bytes=80 * MIB // tensor,
            optimizer_bytes=240 * MIB // tensor,
        )
        modules = {
            "image_encoder": replace(image, layer=layer),
            "text_decoder": replace(text, layer=replace(text.layer, dense=state)),
        }
        measurements.append(replace(m, modules=modules))
    return replace(profile, measurements=tuple(measurements))


def plan(tmp_path: Path, profile: Profile, *words: str) -> int:
    profile.write(tmp_path / "profile.json")
    sizes = ["--nnodes", "1", "--nproc-per-node", "4", "--global-batch-size", "8", "--out", str(tmp_path)]
    return main(["plan", "--profile", str(tmp_path / "profile.json"), "--hetero-parallel", *sizes, *words])


def test_an_encoder_that_tensor_parallelism_does_not_help_gets_a_layout_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, encoder_bound(800), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    result = json.loads((tmp_path / RESULT_FILE).read_text())
    compared: dict[str, Any] = result["hetero_parallel"]
    assert printed["hetero_parallel"] == compared
    assert compared["faster"]
    assert compared["modules"]["image_encoder"]["DP"] == 4
    assert compared["speed_up"] == pytest.approx(compared["homogeneous"]["e2e_time"] / compared["e2e_time"])
    assert compared["speed_up"] > 1.05
    assert result["e2e_time"] == compared["e2e_time"] >= compared["lower_bound"]
    assert result["layer_placement"]["vit_layer_placement"] == [2]
    best, other = Plan.read(tmp_path / "plan.json"), Plan.read(tmp_path / "homogeneous_plan.json")
    assert best.hetero is not None
    assert best.hetero.homogeneous is not None
    assert best.hetero.homogeneous.step_us == other.step.total_us
    assert other.hetero is None


def test_hetero_may_fit_where_no_homogeneous_plan_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, encoder_bound(500), "--virtual-sizes", "1") == 0
    assert "no homogeneous plan fits" in capsys.readouterr().out
    compared = json.loads((tmp_path / RESULT_FILE).read_text())["hetero_parallel"]
    assert (compared["speed_up"], compared["homogeneous"]) == (None, None)
    assert "no plan fits in 500.0 MiB" in compared["homogeneous_note"]


def test_the_faster_homogeneous_plan_stays_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, small_profile()) == 0
    assert "hetero does not pay" in capsys.readouterr().out
    result = json.loads((tmp_path / RESULT_FILE).read_text())
    assert not result["hetero_parallel"]["faster"]
    assert result["e2e_time"] == result["hetero_parallel"]["homogeneous"]["e2e_time"]
    assert Plan.read(tmp_path / "plan.json").hetero is None
    assert Plan.read(tmp_path / "hetero_plan.json").hetero is not None


def test_written_hetero_plan_is_replayed_and_edited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, small_profile()) == 0
    file = tmp_path / "hetero_plan.json"
    before = Plan.read(file)
    assert main(["simulate", "--plan", str(file), "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert replayed["step_time_ms"] == pytest.approx(before.step.total_us / 1000)
    content = json.loads(file.read_text())
    content["global_batch_size"] *= 2
    content["num_microbatches"] *= 2
    file.write_text(json.dumps(content))
    assert main(["simulate", "--plan", str(file)]) == 2
    assert "Plan again for another global batch" in capsys.readouterr().err


def test_no_fit_exits_with_three_and_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, small_profile(capacity_mib=60), "--json") == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "infeasible"
    reason = answer["reason"]
    assert "encoders alone hold" in reason
    assert "Nearest is " in reason and "is enough" in reason, "what would fit is named, as without hetero layouts"


@pytest.mark.parametrize(
    ("ended", "code", "told"),
    [
        (InfeasiblePlan("no hetero plan fits in 9 MiB."), 0, "no hetero plan: no hetero plan fits in 9 MiB."),
        (KeyboardInterrupt(), 130, "interrupted: the best plan so far"),
    ],
)
def test_a_homogeneous_plan_is_kept_however_the_hetero_search_ends(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ended: BaseException,
    code: int,
    told: str,
) -> None:
    def search_hetero(*_: Any, **__: Any) -> None:
        raise ended

    monkeypatch.setattr(wanted, "search_hetero", search_hetero)
    assert plan(tmp_path, small_profile()) == code
    assert told in capsys.readouterr().err
    kept = Plan.read(tmp_path / "plan.json")
    assert kept.hetero is None and all(rank.peak_bytes <= rank.limit_bytes for rank in kept.memory)


def test_a_profile_without_an_encoder_exits_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, backbone_profile(small_profile())) == 2
    error = capsys.readouterr().err
    assert "needs an encoder before the backbone" in error
    assert "layouts to search" not in error, "it is refused before any search"


def test_model_file_of_another_model_is_refused_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"image_encoder": {"num_layers": 2}, "text_decoder": {"num_layers": 5}}))
    assert plan(tmp_path, small_profile(), "--mm-model", str(model)) == 2
    captured = capsys.readouterr()
    assert "'text_decoder': 5" in captured.err
    assert "best" not in captured.err


def test_model_file_is_copied_with_sizes_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"image_encoder": {"num_layers": 2}, "text_decoder": {"num_layers": 4}}))
    assert plan(tmp_path, small_profile(), "--mm-model", str(model)) == 0
    written = Path(json.loads((tmp_path / RESULT_FILE).read_text())["hetero_parallel"]["model_file"])
    assert written.parent == tmp_path
    assert json.loads(written.read_text())["text_decoder"]["tp"] >= 1
    assert f"--hetero-parallel --mm-model {written}" in capsys.readouterr().out
