"""Start a script of this folder on several real processes and compare its records with the reference."""

import functools
from pathlib import Path

import torch
from ranks import run_ranks

HERE = Path(__file__).parent


def launch(script, num_processes, *arguments, megatron_path=None, timeout=560):
    """Standard output of the job, rank by rank; fails the test with the last lines of the ranks that failed."""
    environment = {"TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    folders = [megatron_path] if megatron_path else []
    ranks = run_ranks(
        num_processes,
        HERE / script,
        *arguments,
        python_path=[*folders, HERE.parents[2]],
        environment=environment,
        timeout_s=timeout,
        cwd=Path.cwd(),
    )
    return "".join(rank.stdout for rank in ranks)


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
        "image_generator": 0.0,
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


@functools.cache
def load(folder, name):
    """Return the record of a case; it is not to be changed, as tests of the same launch get the same one."""
    return torch.load(Path(folder) / f"{name}.pt", weights_only=False)
