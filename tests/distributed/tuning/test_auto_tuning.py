"""``--auto-tuning`` end to end: cold, warm, verified; traces equal the measurements of real ranks."""

import json
import os
import shlex
import subprocess

import pytest
from auto_tuning import DEEP_GPT, ENVIRONMENT, MOE, ROOT, SECRET_TOKEN, points_of, result_of, tune
from forked_python import forked_python

from mindspeed_autoparallel.predict.calibration import stored_observations
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase

pytestmark = [pytest.mark.timeout(1200), pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]
RANDOM_STATE_BYTES = 5056
"""A generator's state on the CPU: real forks of it leave one alive that a trace has not got."""


@pytest.fixture(autouse=True)
def _host_is_here():
    pytest.importorskip("megatron.training")


@pytest.fixture(scope="module", params=["gpt", "moe"])
def cold(request, tmp_path_factory):
    """A first run with nothing known: kind of model, its work dir, its output."""
    if request.param == "gpt":
        finished = request.getfixturevalue("finished_run")
        return "gpt", finished.work, finished.output
    work = tmp_path_factory.mktemp("moe") / "work"
    code, text = tune(work, model=MOE)
    assert code == 0, text[-4000:]
    return "moe", work, text


def test_a_cold_run_measures_in_one_launch_and_recommends_three(cold):
    kind, work, text = cold
    result = result_of(work)
    purposes = [launch["purpose"] for launch in result["launches"]]
    assert purposes.count("calibrate") == 1
    assert result["num_device_launches"] == 1 + purposes.count("verify") <= 4
    assert 1 <= len(result["top"]) <= 3
    times = [plan["step_time_ms"] for plan in result["top"]]
    assert times == sorted(times)
    assert result["knowledge"]["covered_time_share"] > 0.95
    assert all(stage in text for stage in ("stage 1 of 3", "stage 2 of 3", "stage 3 of 3"))
    assert ("expert parallel" in result["left_out_dimensions"]) == (kind == "gpt")
    page = (work / "auto_tuning_report.html").read_text()
    assert all(plan["label"] in page for plan in result["top"])
    assert (work / "auto_tuning_plan_1.html").exists()


def test_children_get_the_announced_variables_and_no_secrets(cold):
    _, work, _ = cold
    argv = work / "auto_tuning_modified_argv.json"
    assert argv.exists()
    assert work.stat().st_mode & 0o777 == 0o700
    files = [path for path in work.rglob("*") if path.is_file() and path.suffix != ".sqlite"]
    assert files
    assert not any("hunter2" in path.read_text(errors="replace") for path in files)


def test_tensor_ranks_split_experts_by_default(cold):
    kind, work, _ = cold
    if kind == "gpt":
        pytest.skip("no experts")
    traces = points_of(work / "traces")
    (wide,) = (trace for name, trace in traces.items() if name.startswith("TP2_CP1_EP1_MBS1_"))

    def num_parameters(trace, variant):
        counts = trace["variants"][variant]["modules"][0]["blocks"]["layer"]["parameters"]
        return sum(count["num_parameters"] for count in counts.values())

    alone = num_parameters(traces["TP1_CP1_EP1_MBS1.json"], "|none")
    assert num_parameters(wide, "|none") < 0.6 * alone < num_parameters(wide, "whole experts|none")


def test_traced_bytes_equal_those_of_real_ranks(cold):
    """Bytes kept, of parameters and of peaks; gloo copies what it reduces and gathers, so those peaks are higher."""
    _, work, _ = cold
    traces, measured = points_of(work / "traces"), points_of(work / "measurements")
    assert measured
    for name, real in measured.items():
        trace = traces[name]["variants"]["|none"]
        assert trace["bytes_per_trained_parameter"] == real["bytes_per_trained_parameter"], name
        for pretended, held in zip(trace["modules"], real["modules"], strict=True):
            for block, values in held["blocks"].items():
                other = pretended["blocks"][block]
                where = f"{name} {block}"
                assert other["parameters"] == values["parameters"], where
                assert other["output_bytes"] == values["output_bytes"], where
                assert other["saved_bytes"] == pytest.approx(values["saved_bytes"], abs=RANDOM_STATE_BYTES), where
                if "TP1" in name and "EP1" in name:
                    assert other["backward_peak_bytes"] == pytest.approx(
                        values["backward_peak_bytes"], abs=RANDOM_STATE_BYTES
                    ), where


def test_the_same_launch_runs_pipelines_and_keeps_what_they_add(cold):
    """With four layers an interleaved one, too; each rank's passes are those of Megatron's schedule."""
    kind, work, _ = cold
    chunks = {"gpt": [1, 2], "moe": [1]}[kind]
    found = [json.loads(path.read_text()) for path in sorted(work.glob("measurements/*/pipeline_*.json"))]
    assert [item["stages"]["virtual_size"] for item in found] == chunks
    for item in found:
        number = item["stages"]["num_microbatches"] * item["stages"]["virtual_size"]
        assert [rank["stage"] for rank in item["ranks"]] == [0, 1]
        for rank in item["ranks"]:
            assert len(rank["forward_us"]) == len(rank["backward_us"]) == number
            assert 0 < sum(rank["forward_us"]) + sum(rank["backward_us"]) < rank["schedule_us"] < rank["step_us"]
    base = KnowledgeBase(work / "knowledge.sqlite")
    ((device, software, _),) = base.fingerprints()
    figures = ["message", "stage_first", "stage_inner", "stage_last", "pipeline_step"]
    figures += ["interleaved_message"] * (len(chunks) > 1)
    kept = {
        name: [sample.median_us for _, sample in base.of_name(device, software, f"host.{name}")] for name in figures
    }
    assert all(len(values) == 1 for values in kept.values()), kept
    assert not base.of_name(device, software, "host.no_pipeline")


def test_with_a_warm_knowledge_base_nothing_is_launched_on_devices(finished_run, tmp_path):
    words = [*SECRET_TOKEN, "--auto-tuning-knowledge-base", finished_run.work / "knowledge.sqlite"]
    code, text = tune(tmp_path / "again", *words, script=finished_run.script, model=DEEP_GPT)
    assert code == 0, text[-4000:]
    again = result_of(tmp_path / "again")
    assert again["num_device_launches"] == 0
    assert "nothing has to be measured" in text
    first = result_of(finished_run.work)
    assert [plan["step_time_ms"] for plan in again["top"]] == pytest.approx(
        [plan["step_time_ms"] for plan in first["top"]], rel=0.02
    )


def test_verified_configurations_report_measured_beside_predicted(finished_run):
    work, text = finished_run.work, finished_run.output
    result = result_of(work)
    assert len(result["verified"]) == len(result["top"])
    for item in result["verified"]:
        assert item["status"] == "ok", item
        assert item["measured_step_ms"] > 0
        # Buffers of gloo and the host's random states weigh something in a model of 80 KB.
        assert abs(item["memory_error"]) < 0.1, item
    assert "measured: step" in text
    assert text.count(f"added to {work.parent / 'mine.json'}") == len(result["top"])
    learnt = stored_observations(work.parent / "mine.json")
    assert [item.step_ms for item in learnt] == [item["measured_step_ms"] for item in result["verified"]]


def test_the_pasted_command_trains(finished_run):
    command = shlex.split(result_of(finished_run.work)["top"][0]["command"])
    assert not any(word.startswith(("--auto-tuning", "--auto-parallel")) for word in command)
    assert command[0] == "torchrun"
    run = subprocess.run(
        [forked_python(), "-m", "torch.distributed.run", *command[1:]],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        text=True,
        capture_output=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "iteration        4/       4" in run.stdout
