"""Which share of a single product's speed the grouped products of experts reach, and how well it predicts other runs.

    python tests/benchmarks/auto_tuning/expert_fraction.py DATA.json

Takes the published runs of two models with experts on three devices (``predict_rows.py``): prints their errors for each
share, then for each run the share that meets the others best (mean error) and the run's error with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from predict_rows import QWEN3_30B, gpt_oss

from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.predict.price import price

SHARES = np.arange(0.4, 1.01, 0.05)
QWEN3_30B_MS = 24713.8


def published_runs(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], float]]:
    """Name, request and step time in ms; several releases' rates of one run by their geometric mean."""
    runs = []
    for (gpu, _, expert), (request, rates) in gpt_oss(rows).items():
        tokens = request["train"]["gbs"] * request["model"]["seq"] / request["hw"]["num_gpus"]
        runs.append((f"GPT-OSS-120B, {gpu}, ep {expert}", request, tokens / float(np.exp(np.log(rates).mean())) * 1e3))
    return [*runs, ("Qwen3-30B-A3B, H100, ep 16", QWEN3_30B, QWEN3_30B_MS)]


def predicted_ms(request: dict[str, Any], share: float) -> float:
    """Step time with grouped products at ``share``."""
    work = read_workload(request)
    device = find_device(work.gpu)
    changed = dataclasses.replace(device.efficiency(work.stack), expert_fraction=share)
    return price(work, dataclasses.replace(device, efficiencies={work.stack: changed})).step.total_us / 1e3


def main() -> None:
    """Scans, leaves out, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    runs = published_runs(json.loads(parser.parse_args().data.read_text())["rows"])
    errors = np.array([[predicted_ms(request, share) / step - 1 for _, request, step in runs] for share in SHARES])
    print("share  " + "  ".join(name for name, *_ in runs))
    for share, found in zip(SHARES, errors, strict=True):
        print(f"{share:5.2f}  " + "  ".join(f"{error:+.1%}" for error in found) + f"  mean {abs(found).mean():.1%}")
    left_out = []
    for index, (name, *_) in enumerate(runs):
        best = int(np.abs(np.delete(errors, index, axis=1)).mean(axis=1).argmin())
        left_out.append(abs(errors[best, index]))
        print(f"without {name}: {SHARES[best]:.2f}, error {errors[best, index]:+.1%}")
    print(f"mean of those {np.mean(left_out):.1%}")


if __name__ == "__main__":
    main()
