"""Verdicts through the front, on limits just below and above the peak of the fullest of real ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_python

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.runtime.launch.ports import reserved_port
from mindspeed_autoparallel.units import MIB

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.torch,
    pytest.mark.megatron,
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs/examples/pretrain_gpt.py"
FLAGS = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 16 --tokenizer-type NullTokenizer
    --vocab-size 511 --make-vocab-size-divisible-by 128 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --lr 1e-3 --train-iters 20 --mock-data --use-distributed-optimizer --log-interval 1
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm
    --eval-interval 1000 --eval-iters 0 --transformer-impl local --untie-embeddings-and-output-weights --num-workers 0"""
LAYOUTS = {
    "TP2 PP2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
    "PP2 VPP2 selective": (
        4,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --recompute-granularity selective",
    ),
    "TP2 CP2 full": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "PP2 TP2 EP2 on eight": (
        8,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-experts 4 "
        "--expert-model-parallel-size 2 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
        "--moe-token-dispatcher-type alltoall",
    ),
}
BELOW, ABOVE = (0.98, 0.995, 0.999), (1.001, 1.005)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a program."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_AUTOPARALLEL")}
    own = {"OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    return {**kept, **own, **more}


def real_peaks(folder: Path, example: Path, flags: list[str], world: int) -> list[int]:
    """Train on ``world`` real ranks and return the peak of each."""
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("real_ranks.py"), folder)
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_verdicts_on_limits_beside_the_real_peak(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world, layout = LAYOUTS[name]
    flags = [*FLAGS.split(), *layout.split()]
    peaks = real_peaks(tmp_path / "real", EXAMPLE, flags, world)
    result = played(tmp_path, EXAMPLE, flags, world)
    for report in result["ranks"]:
        alone, members = report["run"]["peak_bytes"], [peaks[rank] for rank in report["stands_for"]]
        print(name, report["run"]["rank"], alone, members)
        assert all(abs(alone / peak - 1) <= 0.01 for peak in members)
    for share in (*BELOW, *ABOVE):
        limit = str(share * max(peaks) / MIB)
        code = main(["preflight", "--result", str(tmp_path / "preflight_result.json"), "--memory-limit-mib", limit])
        assert code == (3 if share in BELOW else 0), (share, capsys.readouterr().out)
    print(f"LIMITS {name}: {len(BELOW) + len(ABOVE)} of {len(BELOW) + len(ABOVE)} right")
