"""Fits a device to published training runs of many models and layouts, and says how far the fit reaches.

    python tests/benchmarks/prediction/fit_runs.py DATA.json... --device ascend_910b --table llm-table --table llm-ci \
        [--tuned llm-table] [--write]

Runs differ by model and software more than by layout, so a run's error counts less the more runs share its group, and
large errors count linearly. Preference training, adapters, sparse attention and grids of tensor ranks are predicted but
not fitted to. Groups (model and number of devices) are left out in five folds; every fit starts from the neutral values
below. Printed: errors of runs that were left out, order of pairs within a group, half widths that hold nine of ten.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_autoparallel.cost import catalogue
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.step_time import closed_form_us
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.confidence import NOMINAL, extrapolation, features
from mindspeed_autoparallel.predict.fitting import Free, solve, values_of, with_values
from mindspeed_autoparallel.predict.measured_rows import request_of_row
from mindspeed_autoparallel.predict.scoreboard import measured_step_ms

STACK = "megatron-core"
NUM_FOLDS = 5
NEUTRAL = (
    Free("gemm_fraction", 0.8, 0.12, 0.95),
    Free("attention_fraction", 0.42, 0.3, 0.9),
    Free("memory_fraction", 0.55, 0.2, 0.95),
    Free("link_fraction", 0.6, 0.4, 0.95),
    Free("launch_us", 800.0, 0.35),
    Free("step_us", 1e4, 0.5),
    Free("head_passes", 12.0, 0.4),
    Free("expert_fraction", 0.6, 0.4, 1.0),
    Free("inter_fraction", 0.6, 0.2, 0.95),
    Free("overlapped_exposed", 0.6, 0.3, 1.0),
    Free("link_latency_us", 20.0, 0.5),
    Free("tensor_launch_us", 20.0, 0.7),
)
"""Starts and how far (standard deviation of the logarithm) they may be left; datasheet shares have a ceiling."""


@dataclass(frozen=True)
class Run:
    """One published run; reruns of one test are one run with the median of their times."""

    name: str
    group: str
    table: str
    work: Workload
    step_ms: float
    source: str


def read_runs(paths: Sequence[Path], tables: Sequence[str], device: Device) -> list[Run]:
    """Return the runs of the named tables that were measured on ``device`` and are modelled."""
    found: dict[Any, list[Run]] = collections.defaultdict(list)
    for row in (row for path in paths for row in json.loads(path.read_text())["rows"]):
        table = row.get("table") or row["group"]
        step = measured_step_ms(row)
        if table not in tables or row.get("time_unusable") or not step:
            continue
        try:
            request = request_of_row(row)
            work = read_workload(request) if request else None
            if work is None or catalogue.find_device(work.gpu).name != device.name:
                continue
        except ConfigError:
            continue
        source = f"{row['source']['repo']} {row['source']['path'].split('/')[0]}"
        run = Run(row["id"], row["group"], table, work, step, source)
        # What a run keeps in memory does not tell times apart.
        found[row["id"].split("@")[0], dataclasses.replace(work, loss_in_place=True)].append(run)
    return [
        Run(
            runs[0].name,
            runs[0].group,
            runs[0].table,
            work,
            statistics.median(run.step_ms for run in runs),
            runs[0].source,
        )
        for (_, work), runs in found.items()
    ]


def fitted_to(work: Workload) -> bool:
    """Return whether a run is fitted to: others have costs of their own beside the model's."""
    return not (work.preference or work.adapters or work.tensor_grid or work.model.sparse)


def fit(device: Device, runs: Sequence[Run]) -> Device:
    """Return ``device`` with efficiencies fitted to those of ``runs`` that are fitted to."""
    used = [run for run in runs if fitted_to(run.work)]
    sizes = collections.Counter(run.group for run in used)
    weights = np.array([sizes[run.group] ** -0.25 for run in used])
    steps_ms = np.array([run.step_ms for run in used])
    found = solve(device, STACK, [run.work for run in used], steps_ms, weights, NEUTRAL)
    return values_of(device, STACK, found, NEUTRAL)


def ratios(device: Device, runs: Sequence[Run]) -> np.ndarray:
    """Return predicted over measured."""
    return np.array([closed_form_us(run.work, device) / 1e3 / run.step_ms for run in runs])


def left_out(device: Device, runs: Sequence[Run], folds: dict[str, int]) -> np.ndarray:
    """Return predicted over measured, each run by a fit that saw nothing of its fold."""
    result = np.zeros(len(runs))
    own = np.array([folds[key] for key in (run.group for run in runs)])
    for fold in sorted(set(own.tolist())):
        fitted = fit(device, [run for run, other in zip(runs, own, strict=True) if other != fold])
        result[own == fold] = ratios(fitted, [run for run, other in zip(runs, own, strict=True) if other == fold])
    return result


def without_feature(device: Device, runs: Sequence[Run]) -> np.ndarray:
    """Return errors of runs by fits that saw no run with one of their features."""
    errors: list[float] = []
    for feature in sorted({feature for run in runs for feature in features(run.work)}):
        having = [run for run in runs if feature in features(run.work)]
        rest = [run for run in runs if feature not in features(run.work)]
        errors += np.abs(np.log(ratios(fit(device, rest), having))).tolist()
    return np.array(errors)


def pair_order(runs: Sequence[Run], ratio: np.ndarray) -> tuple[int, int]:
    """Return how many pairs of a group's runs, 3 % apart at least, are in the measured order, and how many there are."""
    right = pairs = 0
    for i, first in enumerate(runs):
        for j in range(i):
            second = runs[j]
            if first.group != second.group or abs(np.log(first.step_ms / second.step_ms)) < 0.03:
                continue
            pairs += 1
            predicted = ratio[i] * first.step_ms - ratio[j] * second.step_ms
            right += bool(predicted * (first.step_ms - second.step_ms) > 0)
    return right, pairs


def line(name: str, ratio: np.ndarray) -> str:
    """Return one line of errors."""
    error = np.abs(ratio - 1)
    return (
        f"{name:36s} runs {len(error):3d}  mean {error.mean():6.1%}  median {np.median(error):6.1%}  "
        f"bias {np.exp(np.log(ratio).mean()) - 1:+6.1%}  most {error.max():.0%}"
    )


def print_intervals(kinds: np.ndarray, errors: np.ndarray, own: np.ndarray) -> dict[str, float]:
    """Return half widths by kind of extrapolation; print how many errors those of the other folds hold."""
    widths = {}
    for kind in sorted(set(kinds.tolist())):
        inside = kinds == kind
        widths[kind] = round(float(np.expm1(np.quantile(errors[inside], NOMINAL))), 3)
        held = []
        for fold in sorted(set(own[inside].tolist())):
            others = errors[inside & (own != fold)]
            if len(others):
                held += (errors[inside & (own == fold)] <= np.quantile(others, NOMINAL)).tolist()
        print(
            f"interval {kind}: half width {widths[kind]:.1%}, {inside.sum()} runs, that of the others holds {np.mean(held):.0%}"
        )
    return widths


def main() -> None:
    """Fits, leaves out, prints, writes on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--device", required=True, help="name of a file of the catalogue")
    parser.add_argument("--table", action="append", required=True)
    parser.add_argument("--tuned", action="append", default=[], help="tables of tuned runs")
    parser.add_argument("--each", action="store_true", help="print every run")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    path = Path(catalogue.__file__).parent / "catalogue_data" / f"{arguments.device}.json"
    device = catalogue.read_device(path)
    runs = read_runs(arguments.data, arguments.table, device)
    fitted = fit(device, runs)
    efficiency = fitted.efficiency(STACK)
    print({free.name: round(getattr(efficiency, free.name), 4) for free in NEUTRAL})
    groups = sorted({run.group for run in runs})
    shuffled = np.random.default_rng(0).permutation(len(groups))
    folds = {groups[index]: number % NUM_FOLDS for number, index in enumerate(shuffled)}
    out = left_out(device, runs, folds)
    tuned = np.array([run.table in arguments.tuned for run in runs])
    kept = np.array([fitted_to(run.work) for run in runs])
    print(line("fitted on all: tuned", ratios(fitted, runs)[tuned]))
    print(line("fitted on all", ratios(fitted, runs)))
    for name, chosen in (
        ("tuned", tuned),
        ("kinds that are fitted to", kept),
        ("others", ~kept),
        ("all", kept | ~kept),
    ):
        if chosen.any():
            print(line(f"left out by group: {name}", out[chosen]))
    right, pairs = pair_order(runs, out)
    print(f"order of pairs of one group, 3 % apart or more: {right} of {pairs}")
    named = sorted({name for run in runs if fitted_to(run.work) for name in features(run.work)})
    measured = with_values(fitted, STACK, {"measured_features": tuple(named)})
    kinds = np.array([extrapolation(run.work, measured) for run in runs])
    widths = print_intervals(kinds, np.abs(np.log(out)), np.array([folds[run.group] for run in runs]))
    new = without_feature(device, [run for run in runs if fitted_to(run.work)])
    if len(new):
        widths.setdefault("unmeasured_features", round(float(np.expm1(np.quantile(new, NOMINAL))), 3))
        print(
            f"runs with a feature that no fitted run has: {len(new)}, mean {np.expm1(new.mean()):.0%}, nine of ten within {np.expm1(np.quantile(new, NOMINAL)):.0%}"
        )
    if arguments.each:
        for index in np.argsort(out):
            print(f"{out[index]:6.2f} {runs[index].step_ms:10.0f} ms {kinds[index]:20s} {runs[index].name}")
    if arguments.write:
        document = json.loads(path.read_text())
        document["efficiencies"][STACK].update(
            {
                **{free.name: round(getattr(efficiency, free.name), 5) for free in NEUTRAL},
                "gradient_exposed": 1.0,
                "relative_error": round(float(np.abs(out[kept] - 1).mean()), 4),
                "intervals": widths,
                "measured_features": named,
                "provenance": f"fitted by tests/benchmarks/prediction/fit_runs.py to {int(kept.sum())} published runs: "
                + "; ".join(sorted({run.source for run in runs})),
            }
        )
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
