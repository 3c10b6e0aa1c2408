"""``--auto-tuning --profile-source analytic``: three configurations for an absent device."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from forked_python import forked_python

pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]
_ROOT = Path(__file__).parents[3]
_FLAGS = """--use-mcore-models --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2 --tokenizer-type NullTokenizer
    --vocab-size 511 --make-vocab-size-divisible-by 128 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --lr 1e-3 --train-iters 2 --mock-data --use-distributed-optimizer
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm
    --eval-interval 1000 --eval-iters 0 --transformer-impl local --untie-embeddings-and-output-weights
    --auto-tuning --auto-tuning-ranks 2 --nproc-per-node 2 --profile-source analytic"""


def test_the_tuner_works_without_the_device_and_notes_it(tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    done = subprocess.run(
        [
            forked_python(),
            "docs/examples/pretrain_gpt.py",
            *_FLAGS.split(),
            "--auto-tuning-work-dir",
            str(tmp_path),
            "--profile-device",
            "Ascend-910B",
        ],
        cwd=_ROOT,
        text=True,
        capture_output=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "auto_tuning_result.json").read_text())
    assert (result["profile_source"], result["device"], result["num_device_launches"]) == ("analytic", "Ascend-910B", 0)
    assert any("nothing was measured" in note for note in result["notes"])
    assert 1 <= len(result["top"]) <= 3
    assert all(entry["step_time_ms"] > 0 for entry in result["top"])
    assert json.loads((tmp_path / result["top"][0]["plan"]).read_text())["profile"]["source"] == "analytic"
    assert "nothing was measured" in done.stdout
