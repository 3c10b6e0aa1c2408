"""Train the tiny example with packs filled to a length: resumed in the middle of an epoch, under hetero, and searched.

PYTHONPATH=. python tests/benchmarks/data/packs.py FOLDER [resume] [hetero] [search]

- ``resume``: 2 processes, 8 steps, saved after 3; from there again: tensors of the last checkpoint that differ.
- ``hetero``: 4 processes, encoder under TP 1 DP 4, decoder under TP 2 PP 2, against padded samples in one process.
- ``search``: ``--auto-parallel-mm`` with a distribution on the packs' script, and training with its plan.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "qwen2vl_tiny"
TRAINING = [
    "--micro-batch-size=3",
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
    "--calculate-per-token-loss",
]
PACKED = ["--data-balance", "--pack-length", "150"]


def uneven_data(folder: Path) -> str:
    """Write the example's records with two short texts before each, and data.json for them."""
    records = []
    for place, record in enumerate(json.loads((EXAMPLE / "data" / "pictures.json").read_text())):
        for text in ("?" * (1 + place % 3), "and then?"):
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "ab"[place % 2]}]
            records.append({"messages": turns, "images": []})
        records.append(record)
    (folder / "uneven.json").write_text(json.dumps(records))
    data = json.loads((EXAMPLE / "data.json").read_text())
    data["dataset_param"]["basic_parameters"].update(
        dataset=str(folder / "uneven.json"), dataset_dir=str(EXAMPLE / "data")
    )
    (folder / "data.json").write_text(json.dumps(data))
    return str(folder / "data.json")


def train(processes: int, *arguments: str) -> str:
    """Return what a training, or with no ``processes`` of its own a search, printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_AUTOPARALLEL")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu", "PYTHONPATH": str(ROOT)}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes else []
    script = str(ROOT / "docs" / "examples" / "pretrain_vlm.py")
    command = [sys.executable, *launcher, script, *TRAINING, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    return done.stdout


def steps_of(output: str) -> dict[int, tuple[float, float]]:
    """Return losses and gradient norms by step."""
    pattern = r"iteration +(\d+)/.*?lm loss: ([0-9.E+-]+) .*?grad norm: ([0-9.]+)"
    return {int(step): (float(loss), float(norm)) for step, loss, norm in re.findall(pattern, output)}


def tensors_of(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """Return every tensor of a checkpoint, whole."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint, scratch)
    content = torch.load(scratch, weights_only=False)
    return {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}


def resume(folder: Path, data: str) -> None:
    """Print how many tensors differ after a resume at step 3 of 8 (36 samples of 33 an epoch)."""
    common = ["--mm-data", data, "--mm-model", str(EXAMPLE / "model.json"), "--train-iters", "8"]
    common += ["--global-batch-size", "12", *PACKED]
    whole = train(2, *common, "--save", str(folder / "whole"), "--save-interval", "3")
    load = ["--load", str(folder / "whole"), "--ckpt-step", "3"]
    again = train(2, *common, *load, "--save", str(folder / "again"), "--save-interval", "8")
    names = [line for line in whole.splitlines() if line.startswith("data balance")][:2]
    print(*names, sep="\n")
    print("losses and norms", {step: steps_of(whole)[step] for step in (4, 8)}, "and", steps_of(again))
    expected = tensors_of(folder / "whole" / "iter_0000008", folder / "whole.pt")
    found = tensors_of(folder / "again" / "iter_0000008", folder / "again.pt")
    differ = [name for name, value in expected.items() if not value.equal(found[name])]
    moments = sum("exp_avg" in name for name in expected)
    print(f"resume: {len(differ)} of {len(expected)} tensors differ ({moments} of them moments of Adam)")


def hetero(folder: Path, data: str) -> None:
    """Print the largest differences of packs under hetero from padded samples in one process."""
    common = ["--mm-data", data, "--train-iters", "6", "--global-batch-size", "12"]
    plain = ["--mm-model", str(EXAMPLE / "model.json")]
    start = str(folder / "start")
    train(
        1,
        *common[:2],
        *plain,
        "--global-batch-size",
        "12",
        "--train-iters",
        "1",
        "--save",
        start,
        "--save-interval",
        "1",
    )
    load = ["--load", start, "--finetune", "--no-load-optim", "--no-load-rng"]
    alone = steps_of(train(1, *common, *plain, *load))
    layout = ["--mm-model", str(EXAMPLE / "model_hetero.json"), "--hetero-parallel"]
    for name, flags in (("packed", ["--pack-samples"]), ("balanced", PACKED[:1]), ("filled", PACKED)):
        found = steps_of(train(4, *common, *layout, *load, *flags))
        assert sorted(found) == sorted(alone)
        worst = [max(abs(found[step][k] / alone[step][k] - 1) for step in alone) for k in (0, 1)]
        print(f"hetero, {name}: losses {worst[0]:.1e}, norms {worst[1]:.1e} (the log has three decimals)", flush=True)


def search(folder: Path, data: str) -> None:
    """Print what a search says on the script of a training with packs, and train with its plan."""
    described = [sys.executable, "-m", "mindspeed_autoparallel", "data", "describe", "--mm-data", data]
    described += ["--mm-model", str(EXAMPLE / "model.json"), "--seq-length", "128", "--output", str(folder / "d.json")]
    subprocess.run(described, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    common = ["--mm-data", data, "--mm-model", str(EXAMPLE / "model.json"), "--train-iters", "4"]
    common += ["--global-batch-size", "24", *PACKED]
    searched = train(
        0,
        *common,
        *["--auto-parallel-mm", "--nnodes=1", "--nproc-per-node=2", "--master-addr=localhost", "--master-port=33040"],
        *["--node-rank=0", "--simulated-nnodes=1", "--simulated-nproc-per-node=4"],
        *["--auto-parallel-data", str(folder / "d.json"), "--auto-parallel-work-dir", str(folder / "work")],
        *["--auto-parallel-output-dir", str(folder / "plan")],
    )
    print(*[line for line in searched.splitlines() if "data:" in line or "packed" in line], sep="\n")
    trained = steps_of(train(4, *common, "--auto-parallel-plan", str(folder / "plan" / "plan.json")))
    print("search: trained with the plan:", trained)


def main() -> None:
    """Run what is named, or everything."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    data = uneven_data(folder)
    for name, run in (("resume", resume), ("hetero", hetero), ("search", search)):
        if name in (sys.argv[2:] or [name]):
            run(folder, data)


if __name__ == "__main__":
    main()
