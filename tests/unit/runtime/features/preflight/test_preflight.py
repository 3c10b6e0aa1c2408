"""The ranks that a pre-flight runs, its verdict, and its report."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from example_plan import example_plan
from exit_codes import exit_code
from made_plans import make_plan

pytest.importorskip("torch")

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.profiles.preflight_result import PassTime, RankReport, RankRun
from mindspeed_autoparallel.profiles.records import json_of
from mindspeed_autoparallel.report.preflight import render, shown_ranks
from mindspeed_autoparallel.runtime.features.preflight.entry import conclude, report_and_exit
from mindspeed_autoparallel.runtime.features.preflight.flags import SCRIPT
from mindspeed_autoparallel.runtime.features.preflight.ranks import kinds_of_ranks, selected
from mindspeed_autoparallel.runtime.features.preflight.request import PreflightRequest, read_request
from mindspeed_autoparallel.spec.layout import Layout, ModuleLayout
from mindspeed_autoparallel.units import MIB

LAYOUT = Layout(pipeline_size=2, tensor_size=2, data_size=2)


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_AUTOPARALLEL_DEVICE", "cpu")


def request(layout: Layout = LAYOUT, limit_mib: int = 100, num_microbatches: int = 4) -> PreflightRequest:
    kinds = kinds_of_ranks(layout, False)
    return PreflightRequest(
        layout=layout,
        plan=None,
        plan_path=None,
        num_microbatches=num_microbatches,
        kinds=kinds,
        selected=kinds,
        num_steps=3,
        imbalance=1.0,
        timeout_s=60.0,
        limit_bytes=limit_mib * MIB,
        limit_source="a test",
        work_dir=Path(),
        output_dir=Path(),
        samples_differ=False,
        switches=(),
    )


def reports(layout: Layout = LAYOUT, peaks_mib: tuple[int, ...] = (80, 60), **changes: object) -> list[RankReport]:
    found = []
    for kind, peak in zip(kinds_of_ranks(layout, False), peaks_mib, strict=True):
        passes = tuple(
            PassTime(kind=name, chunk=0, microbatch=index, us=us)
            for index in range(4)
            for name, us in (("F", 100.0), ("B", 200.0))
        )
        run = RankRun(
            rank=kind.rank,
            status="ok",
            num_steps=3,
            peak_bytes=peak * MIB,
            resident_bytes=20 * MIB,
            peak_place="backward of microbatch 1",
            layer_bytes={"a": 4 * MIB, "b": 4 * MIB},
            passes=passes,
            optimizer_us=50.0,
        )
        run = replace(run, **changes) if kind.rank == 0 else run  # type: ignore[arg-type]  # fields by name
        found.append(
            RankReport(
                run=run, pipeline_rank=kind.pipeline_rank, stands_for=kind.members, why=kind.why, predicted_bytes=None
            )
        )
    return found


def test_ranks_of_a_stage_are_of_one_kind_in_either_order_of_groups() -> None:
    assert [(kind.rank, kind.members) for kind in kinds_of_ranks(LAYOUT, False)] == [
        (0, (0, 1, 2, 3)),
        (4, (4, 5, 6, 7)),
    ]
    assert [(kind.rank, kind.members) for kind in kinds_of_ranks(LAYOUT, True)] == [
        (0, (0, 1, 4, 5)),
        (2, (2, 3, 6, 7)),
    ]


def test_a_stage_of_an_encoders_own_pipeline_is_a_kind_of_its_own() -> None:
    layout = replace(LAYOUT, pipeline_size=1, data_size=4, modules={"vit": ModuleLayout(pipeline_size=4, data_size=2)})
    assert [kind.rank for kind in kinds_of_ranks(layout, False)] == [0, 2, 4, 6]
    assert [kind.rank for kind in kinds_of_ranks(layout, True)] == [0, 1, 2, 3]


def test_a_thousand_ranks_are_as_many_kinds_as_stages() -> None:
    layout = Layout(pipeline_size=16, tensor_size=8, data_size=8)
    kinds = kinds_of_ranks(layout, False)
    assert len(kinds) == 16 and sum(len(kind.members) for kind in kinds) == 1024
    plan = example_plan()
    picked = selected(kinds_of_ranks(plan.layout, False), "ends", plan, plan.layout)
    fullest = max(plan.memory, key=lambda memory: memory.peak_bytes).pipeline_rank
    assert {kind.pipeline_rank for kind in picked} == {0, 7, fullest}


def test_numbers_select_the_ranks_that_stand_for_them() -> None:
    kinds = kinds_of_ranks(LAYOUT, False)
    assert [kind.rank for kind in selected(kinds, "3, 2, 1", None, LAYOUT)] == [2, 0]
    with pytest.raises(ConfigError, match="8 is not a rank of this layout, which has ranks 0 to 7"):
        selected(kinds, "0,8", None, LAYOUT)
    with pytest.raises(ConfigError, match="worst is not a rank"):
        selected(kinds, "worst", None, LAYOUT)


def test_a_layout_fits_if_every_kind_of_ranks_does_and_the_step_is_replayed() -> None:
    result = conclude(request(), reports())
    assert result.verdict == "fits" and "20.0 MiB to spare on the fullest rank, 0" in result.verdict_text
    # 1F1B of two equal stages and four microbatches: (4 + 1) x (100 + 200), and the optimizer.
    assert result.replay_us == 5 * 300 + 50
    text = render(result)
    assert "they stand for 8 of 8" in text and "ranks 4-7" in text and "loss" not in text


@pytest.mark.parametrize("limit", [79, 80, 81])
def test_the_verdict_turns_at_the_peak(limit: int) -> None:
    result = conclude(request(limit_mib=limit), reports())
    assert result.verdict == ("runs_out" if limit < 80 else "fits")
    if limit < 80:
        assert "rank 0 (first stage) runs out of memory by 1.0 MiB" in result.verdict_text
        assert "full recompute of 1 more of 2 layers" in result.advice[0]


def test_out_of_memory_on_the_device_is_reported_with_its_place() -> None:
    ranks = reports(
        status="out_of_memory", peak_bytes=0, reason="CUDA out of memory. Tried to allocate 2 GiB.", passes=()
    )
    result = conclude(request(), ranks)
    assert result.verdict == "runs_out" and result.replay_us is None
    assert "at backward of microbatch 1: CUDA out of memory" in result.verdict_text


@pytest.mark.parametrize("status", ["no_step", "failed"])
def test_a_rank_without_steps_never_fits(status: str) -> None:
    result = conclude(request(), reports(status=status, num_steps=0, peak_bytes=0, reason="ended", passes=()))
    assert result.verdict == "unknown" and "was not run to its end: ended" in result.verdict_text
    assert result.num_ranks_covered == 4


def test_ranks_that_did_not_run_are_left_out_of_the_verdict() -> None:
    result = conclude(request(), reports()[:1])
    assert "for the 4 ranks" in result.verdict_text and result.replay_note == "stages 1 were not run"


def test_ranks_are_shown_as_ranges() -> None:
    assert shown_ranks((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert shown_ranks(tuple(range(0, 40, 2))).endswith("... (20 ranks)")


@pytest.mark.parametrize(("limit", "code"), [("79.5", 3), ("80", 0), ("1e9", 0)])
def test_a_finished_pre_flight_is_compared_with_another_limit(
    limit: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "preflight_result.json"
    write_json_atomic(path, json_of(conclude(request(), reports())))
    assert main(["preflight", "--result", str(path), "--memory-limit-mib", limit]) == code
    assert "verdict: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan.json"], "the training script is missing"),
        (["no_script.py"], "no_script.py is not a file"),
        (["plan.json", "--", __file__], "plan.json"),
        (["--devices", "8", "plan.json", "--", __file__], "has its own number of devices"),
        (["--memory-limit-mib", "nan", __file__], "must be above 0"),
        (["--result", "r.json"], "takes --memory-limit-mib"),
        (["--result", "r.json", "--memory-limit-mib", "5"], "r.json"),
    ],
)
def test_the_front_ends_with_a_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["preflight", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0], lines


def arguments(**values: object) -> argparse.Namespace:
    given = {
        "auto_parallel_preflight": SCRIPT,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "num_layers": 8,
    }
    return argparse.Namespace(**{**given, **values})


def test_the_scripts_own_layout_takes_as_few_devices_as_hold_it(tmp_path: Path) -> None:
    work = {"auto_parallel_work_dir": str(tmp_path / "work")}
    assert read_request(arguments(**work)).layout.label() == "PP2 TP2 DP1 MBS1 SP"
    experts = read_request(arguments(**work, expert_model_parallel_size=4, num_experts=4)).layout
    assert (experts.data_size, experts.num_devices) == (4, 16)
    wide = read_request(arguments(**work, simulated_nnodes=2, simulated_nproc_per_node=4))
    assert wide.layout.data_size == 2 and wide.num_microbatches == 4
    interleaved = read_request(arguments(**work, pipeline_model_parallel_layout="Et*3|(tt|)*2t|L"))
    assert interleaved.layout.virtual_size == 2 and interleaved.layout.schedule == "interleaved"


def test_the_layouts_of_encoders_are_those_of_model_json(tmp_path: Path) -> None:
    sizes: dict[str, dict[str, object]] = {
        "image_encoder": {"pp": 2, "tp": 2, "num_layers": 4, "pipeline_num_layers": [2, 2]},
        "audio_encoder": {"tp": 1},
        "text_decoder": {"tp": 1, "pp": 2, "num_layers": 4, "pipeline_num_layers": [2, 2]},
    }
    (tmp_path / "model.json").write_text(json.dumps(sizes))
    own = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False}
    words = {**own, "hetero_parallel": True, "mm_model": str(tmp_path / "model.json")}
    request = read_request(arguments(**words, auto_parallel_work_dir=str(tmp_path / "work")))
    assert request.layout.num_devices == 4 and set(request.layout.modules) == {"image_encoder", "audio_encoder"}
    assert [kind.members for kind in request.kinds] == [(0, 1), (2, 3)]
    with pytest.raises(ConfigError, match="6"):
        read_request(arguments(**words, auto_parallel_work_dir=str(tmp_path / "work"), simulated_nproc_per_node=6))
    sizes["image_encoder"]["tp"] = sizes["text_decoder"]["tp"] = 3
    (tmp_path / "model.json").write_text(json.dumps(sizes))
    request = read_request(arguments(**words, auto_parallel_work_dir=str(tmp_path / "work")))
    assert request.layout.num_devices == 6


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"simulated_nproc_per_node": 6}, "does not divide the 6 devices"),
        ({"auto_parallel_preflight_ranks": "12"}, "12 is not a rank of this layout, which has ranks 0 to 3"),
        ({"auto_parallel_preflight_imbalance": 0.5}, "must be at least 1, got 0.5"),
        ({"auto_parallel_memory_limit_mib": -1.0}, "above 0 and at most"),
        ({"auto_parallel_memory_limit_mib": float("inf")}, "above 0 and at most"),
        ({"auto_parallel_preflight_steps": 2}, "at least 3, got 2"),
        ({"auto_parallel_preflight": "no_such_plan.json"}, "no_such_plan.json"),
    ],
)
def test_bad_flags_are_named(values: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=said):
        read_request(arguments(auto_parallel_work_dir=str(tmp_path / "work"), **values))


@pytest.mark.parametrize(
    ("nodes", "per_node", "is_taken"),
    [(None, None, True), (2, 8, True), (None, 16, True), (8, 16, False), (2, None, False)],
)
def test_flags_of_the_cluster_must_agree_with_the_plan(
    nodes: int | None, per_node: int | None, is_taken: bool, tmp_path: Path
) -> None:
    make_plan({"text_decoder": [1, 3]}, tensor_size=2, data_size=4).write(tmp_path / "plan.json")
    given = arguments(
        auto_parallel_preflight=str(tmp_path / "plan.json"),
        auto_parallel_work_dir=str(tmp_path / "work"),
        simulated_nnodes=nodes,
        simulated_nproc_per_node=per_node,
    )
    if is_taken:
        assert read_request(given).layout.num_devices == 16
        return
    with pytest.raises(ConfigError, match=f"is {(nodes or 1) * (per_node or 1)} devices, and .* is for 16"):
        read_request(given)


def test_the_output_folder_is_checked_before_any_rank_runs(tmp_path: Path) -> None:
    """The ranks ran, and a traceback ended the command when the result was written."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--auto-parallel-output-dir .*/file cannot be a folder"):
        report_and_exit(tmp_path, tmp_path / "file", lambda: pytest.fail("a rank ran"))
