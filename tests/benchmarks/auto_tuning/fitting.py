"""Fits the efficiencies of a device to measured steps: a few physical ones first, then what single layer shapes need.

Steps of one layer shape share most of their error, so they count as little more than one observation: residuals are
split into the mean of each shape and what is left within it (a random effect per shape). Every fit starts from the same
neutral values, never from the device's stored ones, so that a held-out fit knows nothing of the rows it is asked about.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_autoparallel.cost.analytic.layer_time import correction_key
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.step_time import closed_form_us
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.fitting import least_squares
from mindspeed_autoparallel.predict.measured_rows import request_of_row

FREE = {
    "megatron-2021": (
        *("gemm_fraction", "gemm_inner_half", "attention_fraction", "memory_fraction", "softmax_passes"),
        *("head_passes", "launch_us", "tensor_launch_us", "unfused_softmax_us", "overlap_norm", "link_fraction"),
        *(
            "link_latency_us",
            "inter_fraction",
            "point_to_point_us",
            "optimizer_fraction",
            "step_us",
            "replica_fraction",
        ),
    ),
    "megatron-core": (
        *("gemm_fraction", "attention_fraction", "memory_fraction", "link_fraction", "launch_us", "step_us"),
        "gradient_exposed",
    ),
}
OUTSIDE_OF_LAYERS = (
    *("head_passes", "point_to_point_us", "inter_fraction", "optimizer_fraction", "step_us"),
    "replica_fraction",
)
NEUTRAL = {
    "gemm_fraction": 0.75,
    "gemm_inner_half": 110.0,
    "attention_fraction": 0.5,
    "memory_fraction": 0.75,
    "softmax_passes": 6.0,
    # In fp32: cast, maximum, difference, exponential, sum and quotient forward; product and cast backward.
    "head_passes": 15.0,
    "launch_us": 250.0,
    "tensor_launch_us": 60.0,
    "unfused_softmax_us": 100.0,
    "overlap_norm": 4.0,
    "link_fraction": 0.6,
    "link_latency_us": 12.0,
    "inter_fraction": 0.6,
    "point_to_point_us": 25.0,
    "optimizer_fraction": 0.7,
    "step_us": 3000.0,
    "gradient_exposed": 1.0,
    "replica_fraction": 0.5,
}
CEILING = {
    "gemm_fraction": 0.95,
    "attention_fraction": 0.9,
    "memory_fraction": 0.95,
    "link_fraction": 0.95,
    "inter_fraction": 0.95,
    "optimizer_fraction": 0.95,
    "gradient_exposed": 1.0,
    "tensor_exposed": 1.0,
    "overlap_norm": 12.0,
    "replica_fraction": 1.0,
}
FREELY = (
    "launch_us",
    "tensor_launch_us",
    "unfused_softmax_us",
    "replica_fraction",
    "step_us",
    "point_to_point_us",
    "link_latency_us",
    "gemm_inner_half",
    "gradient_exposed",
    "tensor_exposed",
)
"""What depends on the host and the code; datasheets say nothing about it."""
PRIOR_DEVIATION, FREE_DEVIATION = 0.15, 1.0
"""Standard deviations of the logarithms around the neutral values, of what datasheets bound and of ``FREELY``."""
SHAPE_DEVIATION, ROW_DEVIATION = 0.08, 0.16
"""How far whole shapes, and rows of one shape, lie from the formulas; 0050 says how they were chosen."""


def predict(device: Device, works: Sequence[Workload]) -> np.ndarray:
    """Step time of each workload in ms."""
    return np.array([closed_form_us(work, device) / 1e3 for work in works])


def with_values(device: Device, stack: str, values: dict[str, Any]) -> Device:
    """``device`` with some efficiencies replaced."""
    changed = dataclasses.replace(device.efficiency(stack), **values)
    return dataclasses.replace(device, efficiencies={**device.efficiencies, stack: changed})


def fitted_names(stack: str, neutral: Mapping[str, float]) -> tuple[str, ...]:
    """Efficiencies that a fit from ``neutral`` changes."""
    return (*FREE[stack], *(name for name in neutral if name not in NEUTRAL))


def fit(
    device: Device,
    stack: str,
    works: Sequence[Workload],
    measured: np.ndarray,
    corrections: bool,
    deviations: Sequence[float] = (PRIOR_DEVIATION, FREE_DEVIATION),
    neutral: Mapping[str, float] = NEUTRAL,
) -> Device:
    """Physical efficiencies from neutral ones; then shapes, what lies outside of layers, and shapes once more.

    ``neutral`` may say what is known of the runs, as that they overlapped the reduction of gradients; what it names
    beyond ``NEUTRAL`` is fitted too. Without ``corrections`` the shapes are only noted as measured.
    """
    names = fitted_names(stack, neutral)
    device = with_values(device, stack, {"corrections": (), **{name: neutral[name] for name in names}})
    device = _least_squares(device, stack, works, measured, names, deviations, by_shape=True)
    if not corrections:
        shapes = sorted({correction_key(work) for work in works})
        return with_values(device, stack, {"corrections": tuple((*shape, 0.0) for shape in shapes)})
    device = _fit_corrections(device, stack, works, measured)
    outside = tuple(name for name in names if name in OUTSIDE_OF_LAYERS)
    device = _least_squares(device, stack, works, measured, outside, deviations, by_shape=False)
    return _fit_corrections(device, stack, works, measured)


def _least_squares(
    device: Device,
    stack: str,
    works: Sequence[Workload],
    measured: np.ndarray,
    names: Sequence[str],
    deviations: Sequence[float],
    by_shape: bool,
    rounds: int = 40,
) -> Device:
    """Levenberg-Marquardt on the logarithms of ``names``, held near where they start."""
    # Below its ceiling: at the ceiling a value has no slope and would stay there whatever the measurements say.
    start = np.log([min(getattr(device.efficiency(stack), name), 0.9 * CEILING.get(name, np.inf)) for name in names])
    deviation = np.array([deviations[name in FREELY] for name in names])
    shapes = {key: index for index, key in enumerate(sorted({correction_key(work) for work in works}))}
    shape_of = np.array([shapes[correction_key(work)] for work in works])
    rows_of = np.bincount(shape_of)

    def values(point: np.ndarray) -> dict[str, Any]:
        return {name: min(float(np.exp(x)), CEILING.get(name, np.inf)) for name, x in zip(names, point, strict=True)}

    def residuals(point: np.ndarray) -> np.ndarray:
        error = np.log(predict(with_values(device, stack, values(point)), works) / measured)
        held = (point - start) / deviation
        if not by_shape:
            return np.concatenate([error / ROW_DEVIATION, held])
        means = np.bincount(shape_of, error) / rows_of
        return np.concatenate([means / SHAPE_DEVIATION, (error - means[shape_of]) / ROW_DEVIATION, held])

    point = least_squares(residuals, start, difference=1e-4, least_gain=1e-4, most_damping=1e8, rounds=rounds).point
    return with_values(device, stack, values(point))


def _fit_corrections(device: Device, stack: str, works: Sequence[Workload], measured: np.ndarray) -> Device:
    """What measured steps say about single layer shapes beyond the formulas; shrunk towards none for few rows."""
    keys = [correction_key(work) for work in works]
    table = {tuple(row[:4]): row[4] for row in device.efficiency(stack).corrections}
    for _ in range(4):
        fitted = predict(device, works)
        left: dict[Any, list[float]] = collections.defaultdict(list)
        for key, ratio in zip(keys, np.log(measured / fitted), strict=True):
            left[key].append(float(ratio))
        for key, ratios in left.items():
            table[key] = table.get(key, 0.0) + sum(ratios) / (len(ratios) + 0.3)
        rows = tuple((*key, round(value, 4)) for key, value in sorted(table.items()))
        device = with_values(device, stack, {"corrections": rows})
    return device


def measured_workload(row: Mapping[str, object]) -> Workload | None:
    """Return the workload behind a measured row, or ``None`` where it is incomplete or not modelled."""
    try:
        request = request_of_row(row)
        return None if request is None else read_workload(request)
    except ConfigError:
        return None
