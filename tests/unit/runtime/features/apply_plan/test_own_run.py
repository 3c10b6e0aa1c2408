"""A watched training calibrates a device file, once per plan; unusable runs are reported."""

import argparse
import json
from types import SimpleNamespace

import pytest

from mindspeed_autoparallel.cost.catalogue import find_device, read_device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.calibration import stored_observations
from mindspeed_autoparallel.predict.fitting import predicted_ms
from mindspeed_autoparallel.runtime.features.apply_plan.own_run import add_run, calibration_file

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def run(monkeypatch):
    """Arguments of a training of two processes, and what stands for its plan."""
    monkeypatch.setenv("MINDSPEED_AUTOPARALLEL_DEVICE", "cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    arguments = argparse.Namespace(
        num_layers=4, hidden_size=256, num_attention_heads=4, ffn_hidden_size=1024, seq_length=512,
        padded_vocab_size=1024, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        global_batch_size=4, micro_batch_size=1, cp_comm_type=["p2p"], num_experts=None, fp8=None,
    )  # fmt: skip

    def plan(label, modules=("text_decoder",)):
        return SimpleNamespace(
            layout=SimpleNamespace(label=lambda: label),
            profile=SimpleNamespace(model_hash="0123456789abcdef"),
            model=SimpleNamespace(modules=modules),
        )

    return SimpleNamespace(arguments=arguments, plan=plan)


def measured(step_ms):
    return [{"step_us": step_ms * 1e3, "step_spread": 0.01, "peak_bytes": 1, "steps_us": [step_ms * 1e3]}]


def test_a_run_brings_the_files_prediction_half_way_to_what_it_measured(run, tmp_path):
    path = tmp_path / "mine.json"
    told = add_run(path, run.arguments, run.plan("DP1"), measured(2000.0))
    (observation,) = stored_observations(path)
    assert observation.step_ms == 2000.0
    learnt = read_device(path)
    before, after = (predicted_ms(each, [observation.work])[0] for each in (find_device("CPU"), learnt))
    assert before < after < 2000.0
    assert "kept: half of the change by the only log" in told
    assert "(1 runs): step 2000.0 ms" in told
    assert calibration_file(argparse.Namespace(auto_parallel_calibrate=str(path))) == path


def test_the_same_plan_counts_once_by_its_newest_run(run, tmp_path):
    path = tmp_path / "mine.json"
    for label, step in (("DP1", 2000.0), ("PP1", 2100.0), ("DP1", 2200.0)):
        told = add_run(path, run.arguments, run.plan(label), measured(step))
    assert [item.step_ms for item in stored_observations(path)] == [2100.0, 2200.0]
    assert "by the other runs alone" in told


@pytest.mark.parametrize(
    ("changed", "cores", "reason"),
    [
        ({"mm_model": "model.json"}, 8, "only runs of language models calibrate a device"),
        ({"use_torch_fsdp2": True}, 8, "fully sharded parameters are not modelled"),
        ({}, 0, "2 processes share 1 cores"),
    ],
)
def test_an_unusable_run_is_reported_and_stores_nothing(changed, cores, reason, run, tmp_path, monkeypatch):
    if not cores:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setattr("os.cpu_count", lambda: 1)
    arguments = argparse.Namespace(**{**vars(run.arguments), **changed})
    told = add_run(tmp_path / "mine.json", arguments, run.plan("DP1"), measured(2000.0))
    assert reason in told
    assert not (tmp_path / "mine.json").exists()


def test_a_file_of_the_users_own_or_a_missing_folder_is_refused_before_the_run(run, tmp_path):
    path = tmp_path / "mine.json"
    add_run(path, run.arguments, run.plan("DP1"), measured(2000.0))
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "observations": []}))
    with pytest.raises(ConfigError, match="not overwritten"):
        calibration_file(argparse.Namespace(auto_parallel_calibrate=str(path)))
    with pytest.raises(ConfigError, match="there is no folder"):
        calibration_file(argparse.Namespace(auto_parallel_calibrate=str(tmp_path / "none/mine.json")))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**document, "name": "Another"}))
    assert "is for Another, this run trained on CPU" in add_run(other, run.arguments, run.plan("DP1"), measured(1.0))
    assert calibration_file(argparse.Namespace()) is None


def test_a_model_of_several_modules_is_not_taken_for_its_decoder_alone(run, tmp_path):
    plan = run.plan("DP1", ("vision_model", "language_model"))
    told = add_run(tmp_path / "mine.json", run.arguments, plan, measured(2000.0))
    assert "only runs of language models calibrate a device" in told
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"observations": [{"step_ms": 1}]}', '{"observations": 3}'])
def test_a_broken_file_is_named_in_one_line_before_the_run(text, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.json") as told:
        calibration_file(argparse.Namespace(auto_parallel_calibrate=str(path)))
    assert "\n" not in str(told.value)
