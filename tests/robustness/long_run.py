"""Train thousands of steps under a plan: memory and descriptors do not grow, losses are those without the package.

  python tests/robustness/long_run.py --steps 10000
  python tests/robustness/long_run.py --ways          one rank, 20 steps, started in several ways
The ranks train a tiny GPT under the plan that ``plan`` finds for them, Megatron's own checks off. Their memory and open
descriptors are read at step 500 and at the end. Then the same training runs without the package, by the native
flags that the first one printed, on the stand-in for CUDA that the tests have: the losses of its steps are compared.
``--ways`` compares one rank's losses under a plan with those without the package: compiled by torch, inside pytest,
with data-loader workers, and in a process that ``torch.multiprocessing`` spawned.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.cli.main import main as command
from mindspeed_autoparallel.runtime.launch.ports import reserved_port

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("long_program.py")
SIZES = {"num_layers": 2, "hidden": 32, "heads": 2, "ffn": 64, "seq": 16, "vocab": 64}
_WORDS = """--use-mcore-models --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2 --tokenizer-type NullTokenizer
    --vocab-size 64 --make-vocab-size-divisible-by 8 --lr 1e-3 --lr-decay-style constant --eval-interval 1000000
    --eval-iters 0 --log-interval 1 --transformer-impl local --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --num-workers 0 --mock-data
    --untie-embeddings-and-output-weights --distributed-backend gloo --attention-dropout 0 --hidden-dropout 0
    --rerun-mode disabled --no-check-for-nan-in-loss-and-grad"""
WORDS = tuple(_WORDS.split())
_STEP = re.compile(r"iteration +(\d+)/.*?lm loss: ([0-9.E+-]+)")
_NATIVE = "as native flags: "
SETTLED = 500
"""Step at which memory is read first: allocators have seen every size by then."""


@dataclass(frozen=True)
class Step:
    """One step of a training, as its last rank printed it."""

    number: int
    loss: str
    ids: list[int]
    """Process ids of the ranks."""


@dataclass(frozen=True)
class Reading:
    """One rank at one step."""

    memory_kib: int
    descriptors: int


def trained(folder: Path, words: list[str], way: str, num_ranks: int) -> Iterator[Step]:
    """Start the ranks of ``long_program.py`` and yield their steps."""
    last = num_ranks - 1
    with reserved_port() as port:
        own = {
            "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
            "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), "WAY": way,
        }  # fmt: skip
        ranks = []
        for rank in range(num_ranks):
            place = {**os.environ, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"printed-{way}-{rank}").open("wb") as other:
                output = subprocess.PIPE if rank == last else other
                command = [sys.executable, str(PROGRAM), *words]
                ranks.append(subprocess.Popen(command, cwd=folder, env=place, stdout=output, stderr=other))
        try:
            assert ranks[last].stdout is not None
            with (folder / "lines").open("wb") as lines:
                for line in ranks[last].stdout:
                    lines.write(line)
                    if found := _STEP.search(line.decode(errors="replace")):
                        ids = [int((folder / f"pid-{rank}").read_text()) for rank in range(num_ranks)]
                        yield Step(int(found[1]), found[2], ids)
            if codes := [rank.wait() for rank in ranks if rank.wait()]:
                tails = [(folder / name).read_text()[-2000:] for name in ("lines", f"printed-{way}-{last}")]
                raise SystemExit(f"ranks end with {codes}:\n" + "\n".join(tails))
        finally:
            for rank in ranks:
                rank.kill()


def read(pid: int) -> Reading:
    """Return the resident memory and the open descriptors of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return Reading(int(found[1]), len(list(Path(f"/proc/{pid}/fd").iterdir())))


def planned(folder: Path, num_ranks: int) -> list[str]:
    """Return the words of a training with the plan of the tiny model on so many CPU ranks."""
    (folder / "model.json").write_text(json.dumps({"name": "tiny", "tied_embeddings": False, **SIZES}))
    words = ["plan", "--profile-source", "analytic", "--model", str(folder / "model.json"), "--device", "CPU"]
    words += ["--nnodes", "1", "--nproc-per-node", str(num_ranks), "--global-batch-size", "2"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert command([*words, "--out", str(folder), "--json"]) == 0
    return ["--auto-parallel-plan", str(folder / "plan.json")]


def native_flags(printed: Path) -> list[str]:
    """Return the flags that give the plan without the package, as rank 0 printed them."""
    lines = printed.read_text(errors="replace").splitlines()
    native = next(line for line in lines if line.startswith(_NATIVE)).removeprefix(_NATIVE)
    print(f"native flags: {native}")
    return shlex.split(native)


def long_run(folder: Path, steps: int, compared: int, num_ranks: int) -> bool:
    """Print readings and comparisons; return whether descriptors and losses stay, and memory grows by at most 1 %."""
    losses: dict[int, str] = {}
    readings: dict[int, list[Reading]] = {}
    words = [*WORDS, "--train-iters", str(steps)]
    for step in trained(folder, [*words, *planned(folder, num_ranks)], "", num_ranks):
        if step.number in (SETTLED, *range(1000, steps, 1000), steps - 1):
            readings[step.number] = [read(pid) for pid in step.ids]
            print(step.number, readings[step.number], flush=True)
        losses[step.number] = step.loss
    bare = [
        *words,
        *native_flags(folder / ("printed--0" if num_ranks > 1 else "lines")),
        "--exit-interval",
        str(compared),
    ]
    without = {step.number: step.loss for step in trained(folder, bare, "bare", num_ranks)}
    different = [number for number, loss in without.items() if losses.get(number) != loss]
    print(f"{len(losses)} steps; {len(without)} losses compared, {len(different)} differ: {different[:5]}")
    first, last = readings[min(readings)], readings[max(readings)]
    grown = [b.memory_kib / a.memory_kib - 1 for a, b in zip(first, last, strict=True)]
    print(f"memory grew by {', '.join(f'{share:.2%}' for share in grown)} from step {min(readings)} to {max(readings)}")
    more = any(b.descriptors > a.descriptors for a, b in zip(first, last, strict=True))
    return not different and not more and max(grown) <= 0.01 and len(without) == compared and len(losses) == steps


def ways(folder: Path, steps: int = 20) -> bool:
    """Print for every way whether its losses are those without the package; return whether all are."""
    words, found = [*WORDS, "--train-iters", str(steps)], {}
    plan = planned(folder, 1)
    for way in ("", "compile", "pytest", "workers", "spawn", "bare"):
        more = {"workers": [*plan, "--num-workers", "2"], "bare": native_flags(folder / "lines")}.get(way, plan)
        found[way] = [step.loss for step in trained(folder, [*words, *more], way, 1)]
        equal = found[way] == found[""]
        print(f"{way or 'as a script'}: {len(found[way])} losses, {'equal' if equal else 'different'}", flush=True)
    return len(found[""]) == steps and all(losses == found[""] for losses in found.values())


def main() -> int:
    """Run one of the two comparisons; 1 where it finds a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--compared", type=int, default=200, help="steps without the package")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ways", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        good = (
            ways(folder) if arguments.ways else long_run(folder, arguments.steps, arguments.compared, arguments.ranks)
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
