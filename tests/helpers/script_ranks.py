"""A training script's own ranks: all of them as real processes, followed as a pre-flight follows one, or the pre-flight
of one alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_python

from mindspeed_autoparallel.runtime.launch.ports import reserved_port

MARKS = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
GPT = ROOT / "docs/examples/pretrain_gpt.py"
GPT_FLAGS = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --tokenizer-type NullTokenizer
    --vocab-size 511 --make-vocab-size-divisible-by 128 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --lr 1e-3 --train-iters 20 --mock-data --use-distributed-optimizer --log-interval 1
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm
    --eval-interval 1000 --eval-iters 0 --transformer-impl local --untie-embeddings-and-output-weights --num-workers 0"""
"""A small model; of a flag that is given again, the last value counts."""
PATH = f"{ROOT}{os.pathsep}{ROOT / 'docs/examples'}"
"""Where a copy of an example finds the package and the reference model."""
REAL_RANKS = ROOT / "tests/distributed/preflight/real_ranks.py"


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a program."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_AUTOPARALLEL")}
    own = {"OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "PYTHONPATH": PATH}
    return {**kept, **own, **more}


def real_peaks(folder: Path, example: Path, flags: list[str], world: int) -> list[int]:
    """Train on ``world`` real ranks and return the peak of each."""
    folder.mkdir()
    shutil.copy(REAL_RANKS, folder)
    first = "import mindspeed_autoparallel  # noqa: F401  # first: before megatron\n"
    script = folder / "train.py"
    assert first in example.read_text()
    script.write_text(example.read_text().replace(first, f"{first}import real_ranks\n"))
    with reserved_port() as port:
        running = []
        for rank in range(world):
            task = {"rank": rank, "world_size": world, "plan": "", "num_steps": 3, "imbalance": 1.0, "switches": []}
            task["result"] = str(folder / f"rank{rank}.json")
            path = folder / f"task{rank}.json"
            path.write_text(json.dumps({"kind": "preflight", "preflight": task}))
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            own |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "MINDSPEED_AUTOPARALLEL_TASK": path}
            running.append(
                subprocess.Popen(
                    [forked_python(), str(script), *flags, "--auto-parallel-preflight"],
                    env=environment(**{name: str(value) for name, value in own.items()}),
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=800)[0] for process in running]
    found = []
    for rank, output in enumerate(outputs):
        result = folder / f"rank{rank}.json"
        assert result.exists(), output[-3000:]
        run = json.loads(result.read_text())
        assert run["status"] == "ok" and run["num_steps"] == 3, run
        found.append(run["peak_bytes"])
    return found


def played(folder: Path, example: Path, flags: list[str], world: int) -> dict[str, Any]:
    """Return the result of a pre-flight through the front, its files in ``folder``."""
    words = ["--devices", str(world), "--out", str(folder), "--", str(example), *flags]
    done = subprocess.run(
        [forked_python(), "-m", "mindspeed_autoparallel", "preflight", "--memory-limit-mib", "4096", *words,
         "--auto-parallel-work-dir", str(folder / "work")],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found: dict[str, Any] = json.loads((folder / "preflight_result.json").read_text())
    return found
