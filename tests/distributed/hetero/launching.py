"""Start a script of this folder on several real processes and compare what it recorded with the reference."""

import os
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent


def launch(script, num_processes, *arguments, megatron_path=None, timeout=560):
    """Standard output of the job; fails the test with the log's tail when a process fails."""
    helpers = HERE.parents[1] / "helpers"
    paths = [p for p in (megatron_path, str(HERE.parents[2]), str(helpers), os.environ.get("PYTHONPATH")) if p]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_processes}",
        str(HERE / script),
        *map(str, arguments),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:6000] + done.stderr[-3000:]
    return done.stdout


def relative(found, expected):
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def differences(found, reference):
    """The largest relative difference of each invariant over the steps of ``found``."""
    worst = {
        "loss": max(abs(a - b) for a, b in zip(found["loss"], reference["loss"], strict=False)),
        "norm": max(abs(a / b - 1) for a, b in zip(found["norm"], reference["norm"], strict=False)),
        "spread": found["spread"],
        "image_encoder": 0.0,
        "text_decoder": 0.0,
        "weights": 0.0,
    }
    for mine, right in zip(found["gradients"][:1], reference["gradients"][:1], strict=False):
        for key in mine:
            module = key.split(".")[0]
            worst[module] = max(worst[module], relative(mine[key], right[key]))
    for mine, right in zip(found["weights"], reference["weights"], strict=False):
        assert set(mine) == set(right)
        worst["weights"] = max(worst["weights"], *(relative(mine[key], right[key]) for key in right))
    return worst


def load(folder, name):
    return torch.load(Path(folder) / f"{name}.pt", weights_only=False)
