"""Fits one device's efficiencies to published step times and, with --write, stores them in the catalogue.

    python docs/validation/auto_tuning/fit_device.py DATA.json --group vtrain-single --group vtrain-multi \
        --stack megatron-2021 --device a100_80gb [--folds 5] [--write]

Held-out figures come from folds by (model, devices, batch) group: a group is predicted from the other groups only.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_autoparallel.cost import catalogue
from mindspeed_autoparallel.cost.analytic.collectives import Fabric
from mindspeed_autoparallel.cost.analytic.layer_time import LayerTime, correction_key, layer_time
from mindspeed_autoparallel.cost.analytic.step_time import step_time
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.tuning.scoreboard import measured_step_ms, measured_workload, ranking_by_group

FREE = {
    "megatron-2021": (
        *("gemm_fraction", "gemm_inner_half", "small_tile_fraction", "attention_fraction", "memory_fraction"),
        *("softmax_passes", "head_passes", "launch_us", "tensor_launch_us", "unfused_softmax_us", "overlap_norm"),
        *("link_fraction", "link_latency_us", "inter_fraction", "point_to_point_us", "optimizer_fraction", "step_us"),
    ),
    "megatron-core": (
        *("gemm_fraction", "attention_fraction", "memory_fraction", "link_fraction", "launch_us", "step_us"),
        "gradient_exposed",
    ),
}
CEILING = {
    "gemm_fraction": 0.95,
    "small_tile_fraction": 1.0,
    "attention_fraction": 0.9,
    "memory_fraction": 0.95,
    "link_fraction": 0.95,
    "inter_fraction": 0.95,
    "optimizer_fraction": 0.95,
    "gradient_exposed": 1.0,
}


def predict(device: catalogue.Device, stack: str, works: list[Workload]) -> np.ndarray:
    """Step time of each workload in ms; layers of one shape are computed once."""
    efficiency, seen = device.efficiency(stack), {}
    result = []
    for work in works:
        key = (correction_key(work), work.expert, work.context, work.recompute, work.model.ffn, work.devices_per_node)
        if key not in seen:
            fabric = Fabric.of(device, efficiency, work.devices_per_node, work.inter_node_gbit_per_s)
            seen[key] = layer_time(work, device, efficiency, fabric)
        layer: LayerTime = seen[key]
        result.append(step_time(work, device, layer).total_ms)
    return np.array(result)


def with_values(device: catalogue.Device, stack: str, values: dict[str, Any]) -> catalogue.Device:
    """``device`` with some efficiencies replaced."""
    changed = dataclasses.replace(device.efficiency(stack), **values)
    return dataclasses.replace(device, efficiencies={**device.efficiencies, stack: changed})


def fit_physics(
    device: catalogue.Device,
    stack: str,
    works: list[Workload],
    measured: np.ndarray,
    weights: np.ndarray,
    rounds: int = 25,
) -> catalogue.Device:
    """Levenberg-Marquardt on the logarithms of the free efficiencies, held near where they start."""
    names = FREE[stack]
    # Below its ceiling: at the ceiling a value has no slope and would stay there whatever the measurements say.
    start = np.log([min(getattr(device.efficiency(stack), name), 0.9 * CEILING.get(name, np.inf)) for name in names])

    def values(point: np.ndarray) -> dict[str, Any]:
        return {name: min(float(np.exp(x)), CEILING.get(name, np.inf)) for name, x in zip(names, point, strict=True)}

    def residuals(point: np.ndarray) -> np.ndarray:
        fitted = predict(with_values(device, stack, values(point)), stack, works)
        return np.concatenate([weights * np.log(fitted / measured), 0.3 * (point - start)])

    point, damping = start.copy(), 1e-2
    current = residuals(point)
    for _ in range(rounds):
        jacobian = np.empty((len(current), len(point)))
        for column in range(len(point)):
            moved = point.copy()
            moved[column] += 1e-4
            jacobian[:, column] = (residuals(moved) - current) / 1e-4
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -jacobian.T @ current)
        candidate = residuals(point + step)
        if candidate @ candidate < current @ current:
            gain = 1 - candidate @ candidate / (current @ current)
            point, current, damping = point + step, candidate, damping * 0.3
            if gain < 1e-5:
                break
        else:
            damping *= 6
            if damping > 1e8:
                break
    return with_values(device, stack, values(point))


def fit_corrections(
    device: catalogue.Device, stack: str, works: list[Workload], measured: np.ndarray
) -> catalogue.Device:
    """What measured steps say about single layer shapes beyond the formulas; shrunk towards none for few rows."""
    keys = [correction_key(work) for work in works]
    table = {tuple(row[:4]): row[4] for row in device.efficiency(stack).corrections}
    for _ in range(4):
        fitted = predict(device, stack, works)
        left: dict[Any, list[float]] = collections.defaultdict(list)
        for key, ratio in zip(keys, np.log(measured / fitted), strict=True):
            left[key].append(float(ratio))
        for key, ratios in left.items():
            table[key] = table.get(key, 0.0) + sum(ratios) / (len(ratios) + 0.3)
        rows = tuple((*key, round(value, 4)) for key, value in sorted(table.items()))
        device = with_values(device, stack, {"corrections": rows})
    return device


def fit(
    device: catalogue.Device,
    stack: str,
    works: list[Workload],
    measured: np.ndarray,
    weights: np.ndarray,
    corrections: bool,
) -> catalogue.Device:
    """Formulas first, then layer corrections, then both once more."""
    device = with_values(device, stack, {"corrections": ()})
    device = fit_physics(device, stack, works, measured, weights)
    if corrections:
        for _ in range(2):
            device = fit_corrections(device, stack, works, measured)
            device = fit_physics(device, stack, works, measured, weights, rounds=6)
        device = fit_corrections(device, stack, works, measured)
    return device


def report(title: str, rows: list[dict[str, Any]], fitted: np.ndarray, measured: np.ndarray) -> None:
    """Prints error and ranking by data group."""
    for group in sorted({row["group"] for row in rows}):
        chosen = np.array([row["group"] == group for row in rows])
        errors = np.abs(fitted[chosen] / measured[chosen] - 1)
        ranking = ranking_by_group(
            [(row, float(p), float(m)) for row, p, m, c in zip(rows, fitted, measured, chosen, strict=True) if c]
        )
        print(
            f"{title:24s} {group:16s} rows {chosen.sum():4d}  mean {errors.mean():6.2%}  "
            f"p90 {np.quantile(errors, 0.9):6.2%}  "
            f"max {errors.max():6.2%}  top3 {ranking['top3_hits']}/{ranking['groups']}  "
            f"regret mean {ranking['mean_regret']:.2%} max {ranking['max_regret']:.2%}"
        )


def group_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Rows that a user would choose among: same model, devices and batch."""
    model = row["model"]
    return (
        model.get("name"),
        model.get("hidden"),
        model.get("num_layers"),
        model.get("seq"),
        row["hw"]["num_gpus"],
        row["train"].get("gbs"),
    )


def main() -> None:
    """Fits, cross-validates, prints, writes on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--group", action="append", required=True)
    parser.add_argument("--stack", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--no-corrections", action="store_true")
    parser.add_argument("--leave-out-hidden", action="store_true", help="also predict each hidden size from the others")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    path = Path(catalogue.__file__).parent / "catalogue_data" / f"{arguments.device}.json"
    device = catalogue.read_device(path)
    rows = [
        row
        for row in json.loads(arguments.data.read_text())["rows"]
        if row["group"] in arguments.group and measured_step_ms(row) and measured_workload(row)
    ]
    rows = [
        row
        for row in rows
        if catalogue.find_device(row["hw"]["gpu"]).name == device.name
        and measured_workload(row).stack == arguments.stack
    ]  # type: ignore[union-attr]  # filtered above
    works = [measured_workload(row) for row in rows]
    measured = np.array([measured_step_ms(row) for row in rows])
    counts = collections.Counter(row["group"] for row in rows)
    # Small sources count more per row, or a source of hundreds of rows would drown them.
    weights = np.array([min(4.0, (max(counts.values()) / counts[row["group"]]) ** 0.5) for row in rows])
    corrections = not arguments.no_corrections
    keys = sorted({group_of(row) for row in rows}, key=str)
    order = np.random.default_rng(0).permutation(len(keys))
    fold_of = {keys[index]: place % max(1, arguments.folds) for place, index in enumerate(order)}
    held_out = np.zeros(len(rows))
    for fold in range(arguments.folds if len(keys) >= arguments.folds > 1 else 0):
        inside = np.array([fold_of[group_of(row)] != fold for row in rows])
        trained = fit(
            device,
            arguments.stack,
            [w for w, i in zip(works, inside, strict=True) if i],
            measured[inside],
            weights[inside],
            corrections,
        )
        held_out[~inside] = predict(trained, arguments.stack, [w for w, i in zip(works, inside, strict=True) if not i])
    if held_out.all():
        report(f"held out, {arguments.folds} folds", rows, held_out, measured)
    if arguments.leave_out_hidden:
        for hidden in sorted({row["model"]["hidden"] for row in rows}):
            inside = np.array([row["model"]["hidden"] != hidden for row in rows])
            trained = fit(
                device,
                arguments.stack,
                [w for w, i in zip(works, inside, strict=True) if i],
                measured[inside],
                weights[inside],
                corrections,
            )
            left = [row for row, i in zip(rows, inside, strict=True) if not i]
            report(
                f"without hidden {hidden}",
                left,
                predict(trained, arguments.stack, [w for w, i in zip(works, inside, strict=True) if not i]),
                measured[~inside],
            )
    final = fit(device, arguments.stack, works, measured, weights, corrections)
    report("fitted on all", rows, predict(final, arguments.stack, works), measured)
    efficiency = final.efficiency(arguments.stack)
    for name in FREE[arguments.stack]:
        print(f"  {name} {getattr(efficiency, name):.4g}")
    if arguments.write:
        data = json.loads(path.read_text())
        values = {name: round(getattr(efficiency, name), 5) for name in FREE[arguments.stack]}
        values["corrections"] = [list(row) for row in efficiency.corrections]
        errors = np.abs((held_out if held_out.all() else predict(final, arguments.stack, works)) / measured - 1)
        values["relative_error"] = round(float(errors.mean()), 4)
        sources = sorted(
            {f"{row['source']['repo']}@{row['source']['commit'][:10]} {row['source']['path']}" for row in rows}
        )
        values["provenance"] = (
            f"fitted by docs/validation/auto_tuning/fit_device.py to {len(rows)} published step times: "
            f"{'; '.join(sources[:4])}"
        )
        data["efficiencies"][arguments.stack].update(values)
        path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
