"""The reference training as processes: layouts against each other, against transformers, and through its scripts."""

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

from mindspeed_autoparallel.runtime.launch.ports import reserved_port

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.torch,
    pytest.mark.megatron,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None,
        reason="needs megatron.training (megatron-core 0.19)",
    ),
]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "qwen2vl_tiny"
TOLERANCE = 1e-5
TRAINING = [
    "--micro-batch-size=1",
    "--global-batch-size=4",
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
    "--weight-decay=0",
    "--seed=42",
    "--variable-seq-lengths",
    "--no-gradient-accumulation-fusion",
    "--log-interval=1",
    "--eval-interval=1000",
    "--eval-iters=0",
    "--distributed-backend=nccl",
]


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_AUTOPARALLEL")}
    return {**kept, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "PYTHONPATH": PATH}


def _run(*command: str, processes: int = 0) -> str:
    if processes:
        script, *words = command
        ranks = run_ranks(processes, Path(script), *words, python_path=[ROOT], timeout_s=900, cwd=ROOT)
        return "".join(rank.stdout + rank.stderr for rank in ranks)
    done = subprocess.run(
        [forked_python(), *command],
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def _losses_and_norms(output: str) -> dict[int, tuple[float, float]]:
    pattern = r"iteration +(\d+)/.*?lm loss: ([0-9.E+-]+) .*?grad norm: ([0-9.]+)"
    return {int(step): (float(loss), float(norm)) for step, loss, norm in re.findall(pattern, output)}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("layouts")
    _run(str(HERE / "layouts_worker.py"), str(folder), processes=4)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.parametrize(
    "name",
    [
        "plain/tp2-sp-pp2",
        "plain/pp2-recompute",
        "plain/pp2-distributed-optimizer",
        "plain/cp2-pp2",
        "plain/cp2-tp2-sp",
        "frozen/pp4",
        "everything but text frozen/pp4",
        "tied/pp4",
        "windows/tp2-pp2",
        "audio/tp2-pp2",
    ],
)
def test_layout_gives_the_losses_and_norms_of_the_plain_one_from_one_checkpoint(
    layouts: dict[str, Any], name: str
) -> None:
    expected, got = layouts[name.split("/")[0] + "/dp4"], layouts[name]
    assert got["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    assert got["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)


@pytest.mark.parametrize(
    "name",
    [
        "balanced, dp 4",
        "balanced tp2-sp-dp2",
        "balanced pp2-vpp2",
        "balanced cp2-dp2",
        "exchanged, dp 4",
        "exchanged pp2-vpp2",
    ],
)
def test_rearranged_batches_give_the_losses_and_norms_of_batches_in_order(layouts: dict[str, Any], name: str) -> None:
    expected, got = layouts["ten/dp4"], layouts[f"ten/{name}"]
    assert len(got["losses"]) == 2
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert got["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)


@pytest.mark.parametrize("name", ["packed, dp 4", "packed cp2-tp2-sp"])
def test_packed_samples_give_the_losses_and_norms_of_padded_ones(layouts: dict[str, Any], name: str) -> None:
    expected, got = layouts["pairs/dp4"], layouts[f"pairs/{name}"]
    assert len(got["losses"]) == 2
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert got["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)


def test_packs_filled_to_a_length_give_the_losses_and_norms_of_padded_pairs(layouts: dict[str, Any]) -> None:
    expected, got = layouts["tokens/dp4"], layouts["tokens/filled pp2-vpp2"]
    assert len(got["losses"]) == 2
    assert got["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert got["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)


def test_freezing_changes_what_is_trained(layouts: dict[str, Any]) -> None:
    plain, frozen = layouts["plain/dp4"], layouts["frozen/dp4"]
    text_only = layouts["everything but text frozen/dp4"]
    assert plain["losses"][0] == pytest.approx(frozen["losses"][0], rel=1e-6)
    assert plain["norms"][0] > frozen["norms"][0] > text_only["norms"][0]


def test_qwen2_vl_and_qwen2_5_vl_equal_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the oracle")
    _run(str(HERE / "parity_worker.py"), str(tmp_path))
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == 10
    for name, result in results.items():
        assert result["size of logits"] > 0.5, name
        assert result["logits"] < 1e-5, name
        assert result["loss"] < 1e-5, name
        assert result["input gradient"] < 1e-5, name
        assert result["positions"] == 0, name


def test_training_halves_the_loss_and_its_checkpoint_trains_on_under_another_layout(tmp_path: Path) -> None:
    script = str(ROOT / "docs" / "examples" / "pretrain_vlm.py")
    folder = tmp_path / "checkpoint"
    common = [
        script,
        *TRAINING,
        "--lr=1e-2",
        "--mm-data",
        str(EXAMPLE / "data.json"),
        "--mm-tool",
        str(EXAMPLE / "tools.json"),
    ]
    plain = ["--mm-model", str(EXAMPLE / "model.json")]
    output = _run(*common, *plain, "--train-iters=14", "--save", str(folder), "--save-interval=11", processes=1)
    first = _losses_and_norms(output)
    assert len(first) == 14
    assert sum(first[step][0] for step in (12, 13, 14)) / 3 < first[1][0] / 2

    # Megatron's fp32 Adam without Apex does not get its step count back: both go on with a fresh optimizer.
    resumed = [*common, "--train-iters=14", "--load", str(folder), "--ckpt-step=11", "--no-load-optim"]
    alone = _losses_and_norms(_run(*resumed, *plain, processes=1))
    model = json.loads((EXAMPLE / "model.json").read_text())
    model["image_encoder"]["vision_encoder"]["pipeline_num_layers"] = [3, 1]
    model["text_decoder"]["pipeline_num_layers"] = [0, 4]
    (tmp_path / "model.json").write_text(json.dumps(model))
    layout = ["--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2"]
    together = _losses_and_norms(_run(*resumed, *layout, "--mm-model", str(tmp_path / "model.json"), processes=4))
    assert sorted(alone) == sorted(together) == [12, 13, 14]
    assert alone[12][0] == pytest.approx(first[12][0], rel=TOLERANCE)
    for step in (12, 13, 14):
        assert together[step][0] == pytest.approx(alone[step][0], rel=TOLERANCE)
        assert together[step][1] == pytest.approx(alone[step][1], rel=1e-3)  # the log has three decimals


def test_launch_script_of_the_72b_model_runs_with_other_sizes_and_paths() -> None:
    command = ["bash", str(ROOT / "docs" / "examples" / "pretrain_qwen2vl.sh")]
    with reserved_port() as port:
        environment = {**_environment(), "PYTHON": forked_python(), "MASTER_PORT": str(port)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    assert len(re.findall(r"lm loss: \d", output)) == 5
    assert output.count("flags without effect on this host") == 1
    for flag in ("--use-fused-rmsnorm", "--use-fused-swiglu", "--reuse-fp32-param"):
        assert flag in output


def test_wrong_description_ends_with_its_message_before_anything_is_built(tmp_path: Path) -> None:
    model = json.loads((EXAMPLE / "model.json").read_text())
    model["text_decoder"]["pipeline_num_layers"] = [3]
    (tmp_path / "model.json").write_text(json.dumps(model))
    command = [
        forked_python(),
        str(ROOT / "docs" / "examples" / "pretrain_vlm.py"),
        *TRAINING,
        "--mm-data",
        str(EXAMPLE / "data.json"),
        "--mm-model",
        str(tmp_path / "model.json"),
        "--train-iters",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pipeline_num_layers is [3] and sums to 3; num_layers is 4: 1 layers too few" in done.stderr
    assert "Traceback" not in done.stderr
