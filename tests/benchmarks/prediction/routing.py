"""Asks what imbalance of routing published runs of models with experts imply, and whether one default follows.

    python tests/benchmarks/prediction/routing.py DATA.json... --skip mcore-golden --skip simumax-b200

Runs whose routing is forced to be balanced say nothing of it and show what else a prediction misses; of the others the
imbalance is found with which a prediction meets the measured step, each alone. Printed as well: two runs of one model
and layout of which one is forced to be balanced, and errors with the median of all other models as the default.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_autoparallel.cost import catalogue
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.measured_rows import request_of_row
from mindspeed_autoparallel.predict.price import price
from mindspeed_autoparallel.predict.scoreboard import measured_step_ms

MOST = 32.0
"""Imbalance above which none is looked for."""


class Run(NamedTuple):
    """One run with experts."""

    name: str
    model: str
    balanced: bool
    work: Workload
    device: Device
    step_ms: float


def is_balanced(row: dict[str, Any]) -> bool:
    """Return whether a row's router is forced to be balanced: it says so, or its task measures nothing but speed."""
    train = row["train"]
    return bool(train.get("balanced_router")) or str(train.get("task", "")).endswith("_performance")


def runs_with_experts(rows: list[dict[str, Any]]) -> list[Run]:
    """Return pretraining runs with experts over more than one rank that are modelled."""
    found = []
    for row in rows:
        step = measured_step_ms(row)
        task = str(row.get("train", {}).get("task") or "pretrain")
        if not step or row.get("time_unusable") or not task.startswith(("pretrain", "checkpoint")):
            continue
        try:
            request = request_of_row(row)
            work = read_workload(request) if request else None
            device = catalogue.find_device(work.gpu) if work else None
        except ConfigError:
            continue
        if (
            work is None
            or device is None
            or not work.model.num_experts
            or work.expert_size == 1
            or work.model.capacity_factor
        ):
            continue
        name = str(row["model"].get("name") or row["group"])
        found.append(Run(row["id"], name, is_balanced(row), work, device, step))
    return found


def predicted_ms(run: Run, imbalance: float) -> float:
    """Return the predicted step under ``imbalance``."""
    return price(dataclasses.replace(run.work, imbalance=imbalance), run.device).step.total_us / 1e3


def implied(run: Run, step_ms: float) -> float:
    """Return the imbalance with which the prediction is ``step_ms``: 1 where it is slower without any."""
    low, high = 1.0, MOST
    if predicted_ms(run, low) >= step_ms:
        return low
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predicted_ms(run, middle) < step_ms else (low, middle)
    return low


def main() -> None:
    """Prints runs, pairs and errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument(
        "--skip", action="append", default=[], help="tables that are left out, such as those of tiny tests"
    )
    arguments = parser.parse_args()
    rows = [row for path in arguments.data for row in json.loads(path.read_text())["rows"]]
    rows = [row for row in rows if (row.get("table") or row["group"]) not in arguments.skip]
    runs = runs_with_experts(rows)
    print("predicted without imbalance over measured, and the imbalance that explains the rest")
    by_model = collections.defaultdict(list)
    for run in sorted(runs, key=lambda run: run.balanced):
        ratio, needed = predicted_ms(run, 1.0) / run.step_ms, implied(run, run.step_ms)
        print(f"  {'balanced' if run.balanced else 'routed  '}  {ratio:5.2f}  {needed:6.2f}  {run.name[:70]}")
        if not run.balanced:
            by_model[run.model].append(needed)
    print("one model and layout, routed and balanced: how much longer, and the imbalance that is")
    for run in (run for run in runs if not run.balanced):
        for other in (other for other in runs if other.balanced):
            if run.model == other.model and same_layout(run.work, other.work):
                longer = run.step_ms / other.step_ms
                needed = implied(run, longer * predicted_ms(run, 1.0))
                print(f"  {longer:5.2f}  {needed:6.2f}  {run.name[:60]}")
    errors: dict[str, list[float]] = {"none": [], "median of the other models": []}
    for run in (run for run in runs if not run.balanced):
        others = [value for model, values in by_model.items() if model != run.model for value in values]
        for name, default in (("none", 1.0), ("median of the other models", statistics.median(others))):
            errors[name].append(abs(predicted_ms(run, default) / run.step_ms - 1))
    for name, values in errors.items():
        print(f"default {name}: {len(values)} routed runs, mean error {statistics.mean(values):.1%}")


def same_layout(one: Workload, other: Workload) -> bool:
    """Return whether two runs have devices, sizes, layout and batch in common, whatever else they switch on."""
    names = ("gpu", "num_devices", "tensor_size", "pipeline_size", "context_size", "expert_size", "global_batch")
    return all(getattr(one, name) == getattr(other, name) for name in (*names, "micro_batch", "element_bytes"))


if __name__ == "__main__":
    main()
