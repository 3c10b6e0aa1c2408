"""Fits one device's efficiencies to published step times and, with --write, stores them in the catalogue.

    python tests/benchmarks/auto_tuning/fit_device.py DATA.json --group vtrain-single --group vtrain-multi \
        --stack megatron-2021 --device a100_80gb [--write]

``held_out.py`` says how far such a fit reaches; what it stored of that is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fitting import FREE_DEVIATION, NEUTRAL, PRIOR_DEVIATION, fit, fitted_names, measured_workload, predict

from mindspeed_autoparallel.cost import catalogue
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.predict.scoreboard import measured_step_ms, ranking_by_group


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measured steps of one device and software."""

    rows: Sequence[dict[str, Any]]
    works: Sequence[Workload]
    step_ms: np.ndarray
    device: Device
    path: Path
    stack: str

    def where(self, chosen: np.ndarray) -> Measured:
        """Those of the rows that ``chosen`` is true for."""
        return dataclasses.replace(
            self,
            rows=[row for row, inside in zip(self.rows, chosen, strict=True) if inside],
            works=[work for work, inside in zip(self.works, chosen, strict=True) if inside],
            step_ms=self.step_ms[chosen],
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that say which rows of which device."""
    parser.add_argument("data", type=Path)
    parser.add_argument("--group", action="append", required=True)
    parser.add_argument("--stack", required=True)
    parser.add_argument("--device", required=True, help="name of a file of the catalogue")
    parser.add_argument("--no-corrections", action="store_true", help="formulas only")
    parser.add_argument(
        "--deviations",
        type=float,
        nargs=2,
        default=[PRIOR_DEVIATION, FREE_DEVIATION],
        help="how far fractions, and what depends on host and code, may lie from neutral (logarithm)",
    )
    parser.add_argument(
        "--neutral",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="start of an efficiency that is known of the runs, as gradient_exposed=0.2",
    )
    parser.add_argument("--write", action="store_true", help="store the result in the device's file")


def fit_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What of the flags goes to ``fit``."""
    known = {name: float(value) for name, _, value in (text.partition("=") for text in arguments.neutral)}
    return {
        "corrections": not arguments.no_corrections,
        "deviations": arguments.deviations,
        "neutral": {**NEUTRAL, **known},
    }


def read_measured(arguments: argparse.Namespace) -> Measured:
    """The rows of the named groups that were measured on the device with the software."""
    path = Path(catalogue.__file__).parent / "catalogue_data" / f"{arguments.device}.json"
    device = catalogue.read_device(path)
    rows, works, times = [], [], []
    for row in json.loads(arguments.data.read_text())["rows"]:
        if row["group"] not in arguments.group:
            continue
        step, work = measured_step_ms(row), measured_workload(row)
        if step and work and work.stack == arguments.stack and catalogue.find_device(work.gpu).name == device.name:
            rows.append(row)
            works.append(work)
            times.append(step)
    return Measured(rows, works, np.array(times), device, path, arguments.stack)


def report(title: str, measured: Measured, fitted: np.ndarray) -> None:
    """Prints error and ranking by data group."""
    for group in sorted({row["group"] for row in measured.rows}):
        chosen = np.array([row["group"] == group for row in measured.rows])
        errors = np.abs(fitted[chosen] / measured.step_ms[chosen] - 1)
        compared = zip(measured.rows, fitted, measured.step_ms, chosen, strict=True)
        ranking = ranking_by_group([(row, float(p), float(m)) for row, p, m, inside in compared if inside])
        print(
            f"{title:24s} {group:20s} rows {chosen.sum():4d}  mean {errors.mean():6.2%}  "
            f"p90 {np.quantile(errors, 0.9):6.2%}  "
            f"max {errors.max():6.2%}  top3 {ranking['top3_hits']}/{ranking['groups']}  "
            f"regret mean {ranking['mean_regret']:.2%} max {ranking['max_regret']:.2%}",
            flush=True,
        )


def main() -> None:
    """Fits, prints, writes on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    arguments = parser.parse_args()
    measured = read_measured(arguments)
    stack = measured.stack
    options = fit_options(arguments)
    final = fit(measured.device, stack, measured.works, measured.step_ms, **options)
    report("fitted on all", measured, predict(final, measured.works))
    efficiency = final.efficiency(stack)
    names = fitted_names(stack, options["neutral"])
    for name in names:
        print(f"  {name} {getattr(efficiency, name):.4g}")
    if arguments.write:
        sources = {
            f"{row['source']['repo']}@{row['source']['commit'][:10]} {row['source']['path']}" for row in measured.rows
        }
        store(
            measured.path,
            stack,
            {
                **{name: round(getattr(efficiency, name), 5) for name in names},
                "corrections": [list(row) for row in efficiency.corrections],
                "measured_recompute": sorted({work.recompute for work in measured.works}),
                "provenance": f"fitted by tests/benchmarks/auto_tuning/fit_device.py to {len(measured.rows)} published step "
                f"times: {'; '.join(sorted(sources)[:4])}",
            },
        )


def store(path: Path, stack: str, values: dict[str, Any]) -> None:
    """Replaces efficiencies in a device's file."""
    data = json.loads(path.read_text())
    data["efficiencies"][stack].update(values)
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
