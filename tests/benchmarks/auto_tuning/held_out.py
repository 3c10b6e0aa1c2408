"""How far a device's fit reaches: each value of an axis is predicted from the rows that have another.

    python tests/benchmarks/auto_tuning/held_out.py DATA.json --group vtrain-single --group vtrain-multi \
        --stack megatron-2021 --device a100_80gb [--axis hidden] [--write]

Axes: ``choices`` (five folds of groups that a user would choose among: same model, devices, batch), ``hidden``,
``tensor``, ``micro_batch``, ``layers``, ``pipeline``, ``several_nodes`` (rows of more than one node in five folds of
single rows). Prints errors and ranking per left-out value, and which layer shapes the best plans of the costliest
wrong choices have; then by kind of extrapolation the half width that holds nine of ten errors on the hardest axis, and
how many it holds per axis, also if it comes from all *other* left-out values. --write stores half widths and the mean
error of the first axis. --apart HIDDEN/TENSOR/MICRO_BATCH prints errors and ranking also without rows of those layer
shapes (which stay in the fits of the other axis values). --by-shape: how far each shape is off as a whole, and its rows
around that.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from fit_device import Measured, add_arguments, fit_options, read_measured, report, store
from fitting import fit, predict

from mindspeed_autoparallel.predict.confidence import NOMINAL, extrapolation
from mindspeed_autoparallel.predict.scoreboard import group_key

NUM_FOLDS = 5
ENOUGH = 20
"""Held-out predictions that a kind of extrapolation needs for a half width of its own, and an axis to
count as one."""
VALUES: dict[str, Callable[[Any], Any]] = {
    "hidden": lambda work: work.model.hidden,
    "tensor": lambda work: work.tensor_size,
    "micro_batch": lambda work: work.micro_batch,
    "layers": lambda work: work.model.num_layers,
    "pipeline": lambda work: work.pipeline_size,
}


def folds(axis: str, measured: Measured) -> Iterator[tuple[str, np.ndarray]]:
    """Name and rows of everything that is left out in turn."""
    shuffle = np.random.default_rng(0).permutation
    if axis == "choices":
        keys = sorted({group_key(row) for row in measured.rows}, key=str)
        place = {keys[index]: number for number, index in enumerate(shuffle(len(keys)))}
        for fold in range(min(NUM_FOLDS, len(keys))):
            yield f"fold {fold + 1}", np.array([place[group_key(row)] % NUM_FOLDS == fold for row in measured.rows])
    elif axis == "several_nodes":
        far = np.flatnonzero([work.num_devices > work.devices_per_node for work in measured.works])
        for fold, indices in enumerate(np.array_split(far[shuffle(len(far))], NUM_FOLDS)):
            yield f"part {fold + 1}", np.isin(np.arange(len(measured.rows)), indices)
    else:
        values = np.array([VALUES[axis](work) for work in measured.works])
        for value in sorted(set(values.tolist())):
            yield f"{axis} {value}", values == value


def costliest(measured: Measured, fitted: np.ndarray) -> str:
    """Layer shapes of best plans that were passed over, by what that cost in all."""
    groups: dict[Any, list[int]] = collections.defaultdict(list)
    for index, row in enumerate(measured.rows):
        groups[group_key(row)].append(index)
    lost: dict[str, float] = collections.defaultdict(float)
    for members in groups.values():
        chosen = min(members, key=lambda index: fitted[index])
        best = min(members, key=lambda index: measured.step_ms[index])
        work = measured.works[best]
        lost[f"tensor {work.tensor_size} micro batch {work.micro_batch}"] += (
            measured.step_ms[chosen] / measured.step_ms[best] - 1
        )
    total = sum(lost.values()) or 1.0
    worst = sorted(lost.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{shape} {loss / total:.0%}" for shape, loss in worst)


def print_by_shape(measured: Measured, fitted: np.ndarray) -> None:
    """Print per layer shape how far it is off as a whole and how far its rows scatter around that, worst first.

    What a shape has in common over all depths, pipelines and batches is no error of these; the last line says what is
    left when each shape is off by nothing but its scatter.
    """
    shapes: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
    for index, work in enumerate(measured.works):
        shapes[work.tensor_size, work.micro_batch].append(index)
    error = np.log(fitted / measured.step_ms)
    apart = error.copy()
    for members in shapes.values():
        apart[members] -= np.median(error[members])
    for (tensor, micro), members in sorted(shapes.items(), key=lambda item: -abs(np.median(error[item[1]]))):
        print(
            f"    tensor {tensor} micro batch {micro}: {len(members):3d} rows, whole shape "
            f"{np.expm1(np.median(error[members])):+6.1%}, rows around it {np.abs(apart[members]).mean():.1%}"
        )
    print(f"    without what whole shapes are off: mean error {np.abs(apart).mean():.1%}")


def half_width(found: Sequence[tuple[str, str, np.ndarray]]) -> float:
    """Relative half width that holds nine of ten errors on the hardest axis with enough of them, or of all together."""
    by_axis = collections.defaultdict(list)
    for axis, _, errors in found:
        by_axis[axis].append(errors)
    pooled = [np.concatenate(parts) for parts in by_axis.values()]
    pooled = [errors for errors in pooled if len(errors) >= ENOUGH] or [np.concatenate(pooled)]
    return float(np.expm1(max(np.quantile(errors, NOMINAL) for errors in pooled)))


def main() -> None:
    """Leaves out, fits, predicts, prints, writes on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--apart", action="append", default=[], metavar="HIDDEN/TENSOR/MICRO_BATCH")
    parser.add_argument("--by-shape", action="store_true", help="how far each left-out layer shape is off")
    parser.add_argument("--axis", action="append", choices=["choices", *VALUES, "several_nodes"], default=[])
    arguments = parser.parse_args()
    measured = read_measured(arguments)
    stack = measured.stack
    found: list[tuple[str, str, np.ndarray, np.ndarray]] = []
    for axis in arguments.axis or ["choices", *VALUES, "several_nodes"]:
        pooled = np.zeros(len(measured.rows))
        for name, left in folds(axis, measured):
            if not left.any() or left.all():
                continue
            known, asked = measured.where(~left), measured.where(left)
            device = fit(measured.device, stack, known.works, known.step_ms, **fit_options(arguments))
            fitted = pooled[left] = predict(device, asked.works)
            kinds = np.array([extrapolation(work, device) for work in asked.works])
            found.append((axis, name, kinds, np.abs(np.log(fitted / asked.step_ms))))
            if axis not in ("choices", "several_nodes"):
                report(f"without {name}", asked, fitted)
                shapes = (f"{work.model.hidden}/{work.tensor_size}/{work.micro_batch}" for work in asked.works)
                kept = np.array([shape not in arguments.apart for shape in shapes])
                if kept.any() and not kept.all():
                    report("  those shapes apart", asked.where(kept), fitted[kept])
                if arguments.by_shape:
                    print_by_shape(asked, fitted)
                print(f"    lost by choosing wrongly where the best plan has: {costliest(asked, fitted)}")
        if axis in ("choices", "several_nodes") and pooled.any():
            report(f"left out: {axis}", measured.where(pooled > 0), pooled[pooled > 0])
    widths = {}
    for kind in sorted({kind for _, _, kinds, _ in found for kind in kinds.tolist()}):
        own = [(axis, name, errors[kinds == kind]) for axis, name, kinds, errors in found if (kinds == kind).any()]
        count = sum(len(errors) for *_, errors in own)
        enough = own if count >= ENOUGH else [(axis, name, errors) for axis, name, _, errors in found]
        widths[kind] = round(half_width(enough), 3)
        print(f"{kind:20s} {count:5d} held-out predictions, half width {widths[kind]:.1%}")
        for axis in dict.fromkeys(axis for axis, *_ in own):
            of_axis = [(name, errors) for other, name, errors in own if other == axis]
            size = sum(len(errors) for _, errors in of_axis)
            held = [(errors <= np.log1p(widths[kind])).sum() for _, errors in of_axis]
            crossed = []
            for name, errors in of_axis:
                others = [other for other in enough if other[:2] != (axis, name)]
                crossed.append((errors <= np.log1p(half_width(others or enough))).sum())
            print(
                f"    {axis:16s} of {size:4d} within it {sum(held) / size:4.0%}, "
                f"within that of all other folds {sum(crossed) / size:4.0%}"
            )
    if arguments.write:
        first = np.concatenate([errors for axis, _, _, errors in found if axis == found[0][0]])
        store(measured.path, stack, {"intervals": widths, "relative_error": round(float(first.mean()), 4)})


if __name__ == "__main__":
    main()
