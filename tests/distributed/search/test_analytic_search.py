"""``--auto-parallel-mm --profile-source analytic`` as a user runs it: no launch, a plan, marked as computed."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from forked_python import forked_python

pytestmark = [pytest.mark.torch, pytest.mark.megatron]
ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs/examples/qwen2vl_tiny"
FLAGS = f"""--num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --micro-batch-size 1
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --tokenizer-type NullTokenizer --vocab-size 512
    --seq-length 128 --max-position-embeddings 1024 --make-vocab-size-divisible-by 1 --normalization RMSNorm --swiglu
    --lr 1.0e-3 --train-iters 4 --use-distributed-optimizer --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --eval-interval 10000 --eval-iters 0 --global-batch-size 64
    --mm-data {EXAMPLE / "data.json"} --mm-model {EXAMPLE / "model.json"} --mm-tool {EXAMPLE / "tools.json"}
    --auto-parallel-mm --simulated-nnodes 2 --simulated-nproc-per-node 8 --profile-source analytic""".split()


def _search(folder: Path, *words: str) -> subprocess.CompletedProcess:
    places = ["--auto-parallel-work-dir", str(folder / "work"), "--auto-parallel-output-dir", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"}
    return subprocess.run(
        [forked_python(), "docs/examples/pretrain_vlm.py", *FLAGS, *places, *words],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=300,
    )


def test_an_absent_cluster_is_planned_without_a_launch_and_the_plan_notes_it(tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    done = _search(tmp_path, "--profile-device", "910B")
    assert done.returncode == 0, done.stderr[-2000:]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["profile"]["source"], plan["profile"]["device"]) == ("analytic", "Ascend-910B")
    assert "nothing was measured" in done.stdout
    assert not list((tmp_path / "work").glob("logs/*"))
    sizes = plan["layout"]
    assert sizes["pipeline_size"] * sizes["tensor_size"] * sizes["data_size"] * sizes["context_size"] == 16


def test_an_unknown_device_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    done = _search(tmp_path, "--profile-device", "TPU")
    assert done.returncode == 2
    assert "unknown device 'TPU'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "plan.json").exists()
