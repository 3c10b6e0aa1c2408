"""``--hetero-parallel`` on the reference training, through Megatron's own pretrain: flags, model.json, log lines."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_python
from ranks import run_ranks
from script_ranks import PATH

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.distributed,
    pytest.mark.torch,
    pytest.mark.megatron,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None,
        reason="needs megatron.training (megatron-core 0.19)",
    ),
]

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs" / "examples" / "pretrain_vlm.py"
EXAMPLE = ROOT / "docs" / "examples" / "qwen2vl_tiny"
STEPS = 4
# The log prints seven digits of the loss and three decimals of the norm.
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-3
TRAINING = [
    "--micro-batch-size=1",
    "--global-batch-size=8",
    "--num-layers=4",
    "--hidden-size=64",
    "--num-attention-heads=4",
    "--vocab-size=512",
    "--tokenizer-type=NullTokenizer",
    "--seq-length=128",
    "--max-position-embeddings=1024",
    "--make-vocab-size-divisible-by=8",
    "--lr=5e-3",
    "--lr-decay-style=constant",
    "--lr-decay-iters=100",
    "--clip-grad=1.0",
    "--weight-decay=0.01",
    "--seed=42",
    "--variable-seq-lengths",
    "--no-gradient-accumulation-fusion",
    "--log-interval=1",
    "--eval-interval=1000",
    "--eval-iters=0",
    "--distributed-backend=nccl",
    # Drawn from what an element is, so that every layout drops the same.
    "--hidden-dropout=0.1",
    "--attention-dropout=0.1",
]
EVALUATION = ["--eval-interval=2", "--eval-iters=1"]
NO_DROPOUT = ["--hidden-dropout=0", "--attention-dropout=0"]
DP4_OVER_TP2PP2 = {
    "image": {"tp": 1},
    "audio": {"tp": 2, "sp": True},
    "text": {"tp": 2, "pp": 2, "pipeline_num_layers": [1, 3]},
    "generator": {"tp": 2, "pp": 2, "pipeline_num_layers": [3, 1]},
}
CP2_OVER_CP2TP2 = {
    "image": {"cp": 2, "pp": 2, "pipeline_num_layers": [1, 3]},
    "audio": {"cp": 2, "pp": 2},
    "text": {"tp": 2, "cp": 2},
    "generator": {"tp": 4},
}
TP2_OVER_PP2 = {
    "image": {"tp": 2, "pp": 2, "sp": True, "pipeline_num_layers": [2, 2]},
    "audio": {"tp": 1, "mbs": 4},
    "text": {"pp": 2, "pipeline_num_layers": [2, 2]},
    "generator": {"tp": 1},
}
GENERATOR = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "activation_func": "gelu",
    "loss_weight": 0.5,
}


def model_file(folder: Path, name: str, blocks: dict[str, dict[str, Any]]) -> str:
    """The example with an image and an audio encoder, and these keys in its blocks; an image generator if named."""
    model = json.loads((EXAMPLE / "model_audio.json").read_text())
    model["image_encoder"]["vision_encoder"].update(blocks.get("image", {}))
    model["audio_encoder"].update(blocks.get("audio", {}))
    if "pp" in blocks.get("audio", {}):
        # Without it the stages share the layers evenly.
        del model["audio_encoder"]["audio_encoder"]["pipeline_num_layers"]
    model["text_decoder"].update(blocks.get("text", {}))
    if "generator" in blocks:
        model["image_generator"] = {**GENERATOR, **blocks["generator"]}
    file = folder / f"{name}.json"
    file.write_text(json.dumps(model))
    return str(file)


def data_file(folder: Path) -> str:
    """Samples with one image, with two, with none, with a clip, and with both; the last three are for evaluation."""
    data = json.loads((EXAMPLE / "data_audio.json").read_text())
    files = [str(EXAMPLE / "data" / name) for name in ("pictures.json", "tones.json")]
    data["dataset_param"]["basic_parameters"].update(
        dataset=",".join(files), dataset_dir=str(EXAMPLE / "data"), val_rate=0.2
    )
    file = folder / "data.json"
    file.write_text(json.dumps(data))
    return str(file)


def start(num_processes: int, *arguments: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_AUTOPARALLEL")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "PYTHONPATH": PATH}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command = [forked_python(), *launcher, str(script), *TRAINING, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)


def fork(num_processes: int, *arguments: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    """The same without torchrun: ranks share what importing torch takes."""
    ranks = run_ranks(num_processes, script, *TRAINING, *arguments, python_path=[ROOT], cwd=ROOT, timeout_s=900)
    return subprocess.CompletedProcess([], 0, "".join(rank.stdout for rank in ranks), "")


def train(num_processes: int, *arguments: str, script: Path = SCRIPT) -> str:
    done = fork(num_processes, *arguments, script=script)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:9000] + done.stderr[-3000:]
    return str(done.stdout)


def steps_of(output: str) -> dict[int, tuple[float, float]]:
    pattern = r"iteration +(\d+)/.*?lm loss: ([0-9.E+-]+) .*?grad norm: ([0-9.]+)"
    return {int(step): (float(loss), float(norm)) for step, loss, norm in re.findall(pattern, output)}


def generated_of(output: str) -> list[float]:
    """The generator's loss of every step."""
    return [float(loss) for loss in re.findall(r"iteration +\d+/.*?image_generator loss: ([0-9.E+-]+) ", output)]


def evaluations_of(output: str) -> dict[int, float]:
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"validation loss at iteration (\d+) \| lm loss value: ([0-9.E+-]+)", output)
    }


def assert_same(
    found: dict[int, tuple[float, float]], expected: dict[int, tuple[float, float]], steps: int = 2
) -> None:
    """The second step shows what the first has changed."""
    assert sorted(found) == list(range(1, steps + 1))
    for step, (loss, norm) in found.items():
        assert loss == pytest.approx(expected[step][0], rel=LOSS_TOLERANCE), step
        assert norm == pytest.approx(expected[step][1], rel=NORM_TOLERANCE), step


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights saved by one process (layouts start differently by themselves), and its next steps."""
    folder = tmp_path_factory.mktemp("hetero_host")
    plain, data, weights = model_file(folder, "plain", {"generator": {}}), data_file(folder), str(folder / "weights")
    train(1, "--mm-model", plain, "--mm-data", data, "--train-iters=1", "--save", weights, "--save-interval=1")
    load = ["--load", weights, "--finetune", "--no-load-optim", "--no-load-rng"]
    common = ["--mm-data", data, f"--train-iters={STEPS}"]
    save = ["--save", str(folder / "alone"), "--save-interval=2"]
    output = train(1, "--mm-model", plain, *common, *load, *save, *EVALUATION)
    alone, evaluated = steps_of(output), evaluations_of(output)
    assert len({loss for loss, _ in alone.values()}) == STEPS
    generated = generated_of(output)
    assert len(set(generated)) == STEPS
    assert generated[-1] < generated[0], "it learns"
    return {
        "folder": folder,
        "common": common,
        "two_steps": [*common, *load, "--train-iters=2"],
        "load": load,
        "alone": alone,
        "evaluated": evaluated,
        "generated": generated,
    }


@pytest.fixture(scope="module")
def over_tensor_and_pipeline(job: dict[str, Any]) -> str:
    """Image DP4 and audio TP2 over a text decoder of TP2 and PP2, with everything that splits the optimizer."""
    model = model_file(job["folder"], "dp4_over_tp2pp2", DP4_OVER_TP2PP2)
    return train(
        4,
        "--mm-model",
        model,
        *job["two_steps"],
        "--hetero-parallel",
        "--hetero-encoder-mbs-scale=2",
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        *EVALUATION,
    )


def test_encoders_under_their_own_layouts_train_as_one_process_does(
    job: dict[str, Any], over_tensor_and_pipeline: str
) -> None:
    assert_same(steps_of(over_tensor_and_pipeline), job["alone"])
    assert generated_of(over_tensor_and_pipeline) == pytest.approx(job["generated"][:2], rel=LOSS_TOLERANCE)


def test_evaluation_gives_the_loss_of_one_process(job: dict[str, Any], over_tensor_and_pipeline: str) -> None:
    assert sorted(job["evaluated"]) == [2, 4]
    evaluated = evaluations_of(over_tensor_and_pipeline)
    assert evaluated == {2: pytest.approx(job["evaluated"][2], rel=LOSS_TOLERANCE)}


def test_each_step_logs_the_time_of_its_phases_and_the_bytes_moved(over_tensor_and_pipeline: str) -> None:
    lines = re.findall(
        r"hetero ms per step on rank 3: (.*?) \| (.*?) \| received MiB per step: (.*)", over_tensor_and_pipeline
    )
    assert len(lines) == 2
    for times, encoders, moved in lines:
        assert re.fullmatch(r"(\w+_encoder encode [0-9.]+, encoder_backward [0-9.]+(; )?){2}", encoders)
        values = dict(pair.rsplit(" ", 1) for pair in times.split(", "))
        assert float(values["encode"]) > 0
        assert float(values["backbone"]) > 0
        assert "image_encoder inputs 0.000, outputs 0.000" in moved, "the last stage needs neither"


def test_whole_world_balance_and_recompute_change_nothing(job: dict[str, Any]) -> None:
    model = model_file(job["folder"], "tp2_over_pp2", TP2_OVER_PP2)
    output = train(
        4,
        "--mm-model",
        model,
        *job["common"],
        *job["load"],
        "--hetero-parallel",
        "--hetero-encoder-mbs-scale=3",
        "--hetero-balance=global",
        "--hetero-memory=recompute",
        "--save",
        str(job["folder"] / "pp2"),
        "--save-interval=2",
    )
    assert_same(steps_of(output), job["alone"], STEPS)
    assert generated_of(output) == pytest.approx(job["generated"], rel=LOSS_TOLERANCE)


def test_context_parallel_encoders_over_a_context_parallel_decoder_train_as_one_process_does(
    job: dict[str, Any],
) -> None:
    model = model_file(job["folder"], "cp2_over_cp2tp2", CP2_OVER_CP2TP2)
    output = train(
        4,
        "--mm-model",
        model,
        *job["two_steps"],
        "--hetero-parallel",
        "--sequence-parallel",
        "--hetero-memory=window",
        "--hetero-balance=off",
    )
    assert_same(steps_of(output), job["alone"])
    assert generated_of(output) == pytest.approx(job["generated"][:2], rel=LOSS_TOLERANCE)


def test_a_host_like_mindspeed_mm_trains_through_its_adapters_with_virtual_stages(job: dict[str, Any]) -> None:
    """Its adapters know no samples, so nothing is dropped; neither is in the one process it is compared with."""
    plain = model_file(job["folder"], "without_generator", {})
    alone = steps_of(train(1, "--mm-model", plain, *job["two_steps"], *NO_DROPOUT))
    assert alone[1] != job["alone"][1], "dropout makes a difference"
    adapters = "mindspeed_autoparallel.runtime.hetero.adapters.mindspeed_mm:"
    blocks = {
        "image": {"tp": 1, "hetero": {"adapter": adapters + "ImageEncoder"}},
        "audio": {"tp": 2, "hetero": {"adapter": adapters + "AudioEncoder"}},
        "text": {"pp": 2, "pipeline_num_layers": [[1, 1], [1, 1]]},
    }
    model = model_file(job["folder"], "mindspeed_mm", blocks)
    output = train(
        4,
        "--mm-model",
        model,
        *job["two_steps"],
        "--auto-parallel-hetero",
        "--hetero-encoder-mbs-scale=2",
        *NO_DROPOUT,
        script=Path(__file__).with_name("mindspeed_mm_program.py"),
    )
    assert_same(steps_of(output), alone)


def tensors_of(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole: weights and optimizer state."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint, scratch)
    content = torch.load(scratch, weights_only=False)
    return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}


def test_a_resumed_run_in_the_same_layout_goes_on_bit_by_bit(job: dict[str, Any], tmp_path: Path) -> None:
    """After the run above: from its middle to its end again, weights and Adam's moments of every module."""
    through = job["folder"] / "pp2"
    if not through.exists():
        pytest.skip("needs the checkpoints of the run above")
    model = model_file(job["folder"], "tp2_over_pp2", TP2_OVER_PP2)
    output = train(
        4,
        "--mm-model",
        model,
        *job["common"],
        "--load",
        str(through),
        "--ckpt-step=2",
        "--hetero-parallel",
        "--hetero-encoder-mbs-scale=3",
        "--hetero-balance=global",
        "--hetero-memory=recompute",
        "--save",
        str(tmp_path / "again"),
        "--save-interval=4",
    )
    assert "encoders draw from the seed again" not in output
    last = f"iter_{STEPS:07d}"
    expected = tensors_of(through / last, tmp_path / "through.pt")
    found = tensors_of(tmp_path / "again" / last, tmp_path / "again.pt")
    assert sorted(found) == sorted(expected)
    for part in ("exp_avg.image_encoder", "exp_avg_sq.audio_encoder", "exp_avg.text_decoder"):
        assert any(part in name for name in expected), part
    assert [name for name, value in expected.items() if not value.equal(found[name])] == []


def assert_goes_on(output: str, alone: dict[int, tuple[float, float]]) -> None:
    """Steps 3 and 4 after loading step 2, optimizer included."""
    found = steps_of(output)
    assert sorted(found) == [3, 4]
    # After a load Megatron's second log line still has the first one's loss in its mean.
    losses = [alone[3][0], (alone[3][0] + alone[4][0]) / 2]
    assert [found[step][0] for step in (3, 4)] == pytest.approx(losses, rel=LOSS_TOLERANCE)
    assert [found[step][1] for step in (3, 4)] == pytest.approx([alone[3][1], alone[4][1]], rel=NORM_TOLERANCE)


def test_one_process_goes_on_from_a_hetero_checkpoint_with_its_optimizer(job: dict[str, Any]) -> None:
    saved = job["folder"] / "pp2"
    if not saved.exists():
        pytest.skip("needs the checkpoints of a run above")
    plain = str(job["folder"] / "plain.json")
    output = train(1, "--mm-model", plain, *job["common"], "--load", str(saved), "--ckpt-step=2")
    assert_goes_on(output, job["alone"])


def test_a_hetero_run_goes_on_from_a_homogeneous_checkpoint_with_its_optimizer(job: dict[str, Any]) -> None:
    model = model_file(job["folder"], "dp4_over_tp2pp2", DP4_OVER_TP2PP2)
    load = ["--load", str(job["folder"] / "alone"), "--ckpt-step=2"]
    output = train(4, "--mm-model", model, *job["common"], *load, "--hetero-parallel")
    assert_goes_on(output, job["alone"])


def test_half_precision_and_the_distributed_optimizer_cross_layouts_with_their_state(
    job: dict[str, Any], tmp_path: Path
) -> None:
    # Without dropout: its steps are wilder, and in half precision layouts drift apart sooner.
    kind = ["--bf16", "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable", *NO_DROPOUT]
    plain = ["--mm-model", str(job["folder"] / "plain.json"), *job["common"], *kind]
    saved = str(tmp_path / "alone")
    alone = steps_of(train(1, *plain, *job["load"], "--save", saved, "--save-interval=2"))
    model = model_file(job["folder"], "dp4_over_tp2pp2", DP4_OVER_TP2PP2)
    hetero = ["--mm-model", model, *job["common"], *kind, "--hetero-parallel"]
    # Megatron saves step 4 here again.
    again = ["--load", saved, "--ckpt-step=2", "--save", str(tmp_path / "hetero"), "--save-interval=3"]
    output = train(4, *hetero, *again)
    assert "encoders draw from the seed again" in output
    # Half precision; without the optimizer's state the norm of step 4 is more than twice as large.
    assert steps_of(output)[4][1] == pytest.approx(alone[4][1], rel=0.03)
    back = steps_of(train(1, *plain, "--load", str(tmp_path / "hetero"), "--ckpt-step=3"))
    assert back[4][1] == pytest.approx(alone[4][1], rel=0.03)


def test_when_a_rank_dies_the_others_stop_and_it_is_named(tmp_path: Path) -> None:
    """Long before the time-out of the process groups, which is ten minutes."""
    blocks = {name: block for name, block in DP4_OVER_TP2PP2.items() if name != "generator"}
    model = model_file(tmp_path, "dp4_over_tp2pp2", blocks)
    done = start(
        4,
        "--mm-model",
        model,
        "--mm-data",
        data_file(tmp_path),
        "--train-iters=1000",
        "--hetero-parallel",
        script=Path(__file__).with_name("dying_program.py"),
    )
    assert done.returncode != 0
    assert "iteration        1/" in done.stdout
    root_cause = done.stderr.split("Root Cause (first observed failure):")[-1]
    assert re.search(r"rank +: 2 \(local_rank: 2\)\s+exitcode +: -9", root_cause), done.stderr[-3000:]


def test_a_mistake_ends_every_rank_with_its_message_before_anything_is_built(tmp_path: Path) -> None:
    model = model_file(tmp_path, "uneven", {**DP4_OVER_TP2PP2, "image": {"tp": 3}})
    done = start(2, "--mm-model", model, "--mm-data", data_file(tmp_path), "--train-iters=1", "--hetero-parallel")
    assert done.returncode != 0
    assert "2 ranks are not a multiple of tp 3" in done.stderr, done.stderr[-3000:]
    assert "initializing torch distributed" not in done.stdout
