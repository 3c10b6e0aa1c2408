"""Fits efficiencies of a device to measured steps: least squares on the logarithms, regularized to their start."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_autoparallel.cost.analytic.step_time import closed_form_us
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.predict.price import price

TYPICAL_ERROR = 0.15
"""Standard deviation that a run's step is taken to have around the formulas; larger errors count linearly."""
_ROUNDS = 30


@dataclasses.dataclass(frozen=True)
class Free:
    """An efficiency that is fitted: its neutral value, and how far its logarithm may lie from it."""

    name: str
    start: float
    deviation: float
    ceiling: float = math.inf


@dataclasses.dataclass(frozen=True)
class Solution:
    """Where a fit ended: logarithms of the free values, and their standard deviations by the fit's curvature."""

    point: NDArray[Any]
    deviation: NDArray[Any]


def with_values(device: Device, stack: str, values: Mapping[str, Any]) -> Device:
    """Return ``device`` with some efficiencies of ``stack`` replaced."""
    changed = dataclasses.replace(device.efficiency(stack), **values)
    return dataclasses.replace(device, efficiencies={**device.efficiencies, stack: changed})


def predicted_ms(device: Device, works: Sequence[Workload]) -> NDArray[Any]:
    """Return the step time of each workload."""
    return np.array([price(work, device).step.total_us / 1e3 for work in works])


def _closed_ms(device: Device, works: Sequence[Workload]) -> NDArray[Any]:
    """Return the step times by the formula of equal stages, some fifty times faster than by the simulator."""
    return np.array([closed_form_us(work, device) / 1e3 for work in works])


def _softened(errors: NDArray[Any]) -> NDArray[Any]:
    """Return the errors in units of ``TYPICAL_ERROR``, of which large ones grow as their root (pseudo-Huber)."""
    scaled = errors / TYPICAL_ERROR
    return np.asarray(np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1)))


def least_squares(
    residuals: Callable[[NDArray[Any]], NDArray[Any]],
    start: NDArray[Any],
    *,
    difference: float = 1e-3,
    least_gain: float = 1e-3,
    most_damping: float = 1e6,
    rounds: int = _ROUNDS,
) -> Solution:
    """Minimize the sum of squared ``residuals`` by Levenberg-Marquardt with slopes over a ``difference``.

    Ends after ``rounds``, at a step that gains less than ``least_gain`` of the sum, or where only steps damped by more
    than ``most_damping`` would be left.
    """
    point, damping = start.copy(), 1e-2
    current = residuals(point)
    normal = np.eye(len(point))
    for _ in range(rounds):
        slopes = np.empty((len(current), len(point)))
        for column in range(len(point)):
            moved = point.copy()
            moved[column] += difference
            slopes[:, column] = (residuals(moved) - current) / difference
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slopes.T @ current)
        candidate = residuals(point + step)
        if candidate @ candidate < current @ current:
            gain = 1 - candidate @ candidate / (current @ current)
            point, current, damping = point + step, candidate, damping * 0.3
            if gain < least_gain:
                break
        else:
            damping *= 6
            if damping > most_damping:
                break
    covariance = np.linalg.inv(normal + 1e-9 * np.eye(len(point)))
    return Solution(point, np.sqrt(np.diag(covariance)))


def values_of(device: Device, stack: str, solution: Solution, free: Sequence[Free]) -> Device:
    """Return ``device`` with the fitted values."""
    return with_values(device, stack, _values(solution.point, free))


def _values(point: NDArray[Any], free: Sequence[Free]) -> dict[str, float]:
    return {item.name: min(math.exp(x), item.ceiling) for item, x in zip(free, point.tolist(), strict=True)}


def solve(
    device: Device,
    stack: str,
    works: Sequence[Workload],
    measured_ms: NDArray[Any],
    weights: NDArray[Any],
    free: Sequence[Free],
    *,
    plain: bool = False,
) -> Solution:
    """Return where the weighted errors' logarithms and the distance from the neutral values are least together.

    ``plain``: ``weights`` are the standard deviations of the errors, all of which count squared.
    """
    start = np.log([item.start for item in free])
    deviation = np.array([item.deviation for item in free])

    # How far the formula is from the simulated schedule hardly depends on the figures that are fitted.
    offset = predicted_ms(device, works) / _closed_ms(device, works)

    def residuals(point: NDArray[Any]) -> NDArray[Any]:
        changed = with_values(device, stack, _values(point, free))
        errors = np.log(offset * _closed_ms(changed, works) / measured_ms)
        counted = errors / weights if plain else _softened(errors) * weights
        return np.concatenate([counted, (point - start) / deviation])

    return least_squares(residuals, start)
