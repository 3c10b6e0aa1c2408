"""Measurements that help to choose a plan, and the plan with the least regret without them.

The device's figures are uncertain. Each figure is moved to both ends of nine tenths of its range, one at a time; if
another plan becomes the fastest, the decision depends on that figure. The formulas also have an error of each layer
shape. Plans are undecided if their difference is within nine tenths of the uncertainty of figures and shapes together;
the run that settles most is one of these plans, measured unchanged. The plan with the least worst regret is the safe
one. An experiment is a layout run for some steps on as few devices as hold it; it narrows the figures that its step
depends on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mindspeed_autoparallel.cost.analytic.layer_time import correction_key
from mindspeed_autoparallel.cost.analytic.step_time import closed_form_us
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.predict.calibration import free_figures
from mindspeed_autoparallel.predict.confidence import half_width
from mindspeed_autoparallel.predict.fitting import with_values
from mindspeed_autoparallel.predict.price import price

_REACH = 1.645
"""Standard deviations to either side that nine tenths of a normal range have."""
_NOISE = 0.02
"""Relative noise of a measured step, in addition to the error of its formulas."""
_STEPS = 10
_MOST_EXPERIMENTS = 3
_SHAPE_WIDTH = 0.193
"""Half width that holds nine of ten steps of a layer shape that was never measured, on a device whose other shapes
were: A100, hidden size, tensor size and micro batch left out (docs/validation/prediction_fits.md)."""
_ESTIMATED = 0.1
"""Mean error above which a device's figures are estimates; the uncertainty of shapes is then their whole interval."""
_SETTLED = 0.005
"""Regret below which a choice counts as settled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One cheap run: a layout on few devices, for few microbatches."""

    candidate: int
    """Index of the plan that it shrinks."""
    work: Workload
    device_seconds: float
    worst_regret_after: float
    """Worst regret of the safe plan after this and the earlier experiments."""
    narrows: tuple[str, ...]
    """Figures whose deviation it reduces by more than half."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The certainty of the choice between plans."""

    fastest: int
    """Index of the plan that is predicted fastest."""
    safest: int
    """Index of the plan with the least worst regret."""
    worst_regret: Mapping[str, float]
    """Loss of ``fastest`` and ``safest`` to another plan that one choice in twenty exceeds."""
    undecided: tuple[int, ...]
    """Plans that may be faster than the fastest, most likely first."""
    settling: int | None
    """The one of these whose measurement has the largest expected gain over the fastest."""
    hangs_on: Mapping[str, float]
    """Figures within whose range another plan is the fastest, and the loss of the first plan then."""
    experiments: tuple[Experiment, ...]


def decide(works: Sequence[Workload], device: Device) -> Decision:
    """Return the certainty of the choice between ``works`` (plans of one training), and the runs that would settle
    it."""
    stack = works[0].stack
    names, deviations = _figures(device, stack, works)
    slopes = _slopes(works, device, stack, names)
    times = np.log([price(work, device).step.total_us for work in works])
    fastest = int(np.argmin(times))
    regrets = _regrets(times, slopes, deviations)
    spreads = _spreads(slopes, deviations, _shape_errors(works, device), _shapes(works))
    losses = _losses(times, spreads)
    safest = _safest(losses, fastest)
    undecided = tuple(int(plan) for plan in np.argsort(-losses[fastest]) if losses[fastest, plan] > _SETTLED)
    hangs_on = {
        name: float(max(regrets[fastest, 2 * index], regrets[fastest, 2 * index + 1]))
        for index, name in enumerate(names)
        if max(regrets[fastest, 2 * index], regrets[fastest, 2 * index + 1]) > _SETTLED
    }
    experiments = _experiments(works, device, stack, names, times, slopes, deviations) if hangs_on else ()
    worst = {"fastest": float(losses[fastest].max()), "safest": float(losses[safest].max())}
    return Decision(
        fastest=fastest,
        safest=safest,
        worst_regret=worst,
        undecided=undecided,
        settling=_settling(times, spreads, fastest, undecided),
        hangs_on=dict(sorted(hangs_on.items(), key=lambda item: -item[1])),
        experiments=experiments,
    )


def _shape_errors(works: Sequence[Workload], device: Device) -> NDArray[np.float64]:
    """Return for each plan the standard deviation of the error of its layer shape."""
    estimated = device.efficiency(works[0].stack).relative_error >= _ESTIMATED
    widths = [min(half_width(work, device)[0], math.inf if estimated else _SHAPE_WIDTH) for work in works]
    return np.log1p(widths) / _REACH


def _shapes(works: Sequence[Workload]) -> NDArray[np.intp]:
    """Return a number for each plan; plans with equal layers on every rank share a number."""
    keys = [(*correction_key(work), work.expert_size, work.context_size, work.recompute) for work in works]
    return np.array([keys.index(key) for key in keys])


def _spreads(
    slopes: NDArray[np.float64], deviations: NDArray[np.float64], errors: NDArray[np.float64], shapes: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Return the standard deviations of differences of log step times, ``[plan, other]``.

    Figures move plans together, as far as their slopes are equal. Layers of the same shape have the same error; the
    rest of two such plans counts as uncertain as a measured step.
    """
    moved = ((slopes[:, None] - slopes[None]) * deviations) ** 2
    own = errors[:, None] ** 2 + errors[None] ** 2
    own = np.where(shapes[:, None] == shapes[None], 2 * _NOISE**2, own)
    result = np.sqrt(moved.sum(axis=2) + own)
    np.fill_diagonal(result, 0.0)
    return np.asarray(result)


def _losses(times: NDArray[np.float64], spreads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the loss of each plan to each other one that one choice in twenty exceeds, ``[plan, other]``."""
    return np.asarray(np.expm1(np.maximum(0.0, times[:, None] - times[None] + _REACH * spreads)))


def _settling(
    times: NDArray[np.float64], spreads: NDArray[np.float64], fastest: int, undecided: Sequence[int]
) -> int | None:
    """Return the plan with the largest expected gain if its measurement decides whether it is taken."""
    if not undecided:
        return None
    gained = {}
    for plan in undecided:
        # The expected gain of being able to take ``plan`` where it is faster: E[max(0, -difference)].
        spread, difference = spreads[fastest, plan], times[plan] - times[fastest]
        ratio = difference / spread
        density = math.exp(-(ratio**2) / 2) / math.sqrt(2 * math.pi)
        gained[plan] = spread * density - difference * 0.5 * math.erfc(ratio / math.sqrt(2))
    return max(gained, key=lambda plan: gained[plan])


def _figures(device: Device, stack: str, works: Sequence[Workload]) -> tuple[list[str], NDArray[np.float64]]:
    """Return the figures that ``works`` depend on, and the standard deviations of their logarithms."""
    known = device.efficiency(stack).uncertainty
    free = free_figures(device, stack, works)
    return [item.name for item in free], np.array([known.get(item.name, item.deviation / 2) for item in free])


def _slopes(works: Sequence[Workload], device: Device, stack: str, names: Sequence[str]) -> NDArray[np.float64]:
    """Return the slopes of log step time over the logarithms of figures, ``[plan, figure]``."""
    efficiency = device.efficiency(stack)
    result = np.empty((len(works), len(names)))
    for column, name in enumerate(names):
        value = getattr(efficiency, name)
        high, low = (with_values(device, stack, {name: value * factor}) for factor in (1.05, 1 / 1.05))
        for row, work in enumerate(works):
            ratio = closed_form_us(work, high) / closed_form_us(work, low)
            result[row, column] = math.log(ratio) / (2 * math.log(1.05))
    return result


def _regrets(
    times: NDArray[np.float64], slopes: NDArray[np.float64], deviations: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the regret of every plan at both ends of every figure's range, ``[plan, 2 x figure]``."""
    moved = slopes * deviations * _REACH
    scenarios = np.stack([times[:, None] + moved, times[:, None] - moved], axis=2).reshape(len(times), -1)
    return np.asarray(np.expm1(scenarios - scenarios.min(axis=0)))


def _safest(regrets: NDArray[np.float64], fastest: int) -> int:
    """Return the plan with the least worst regret; the fastest of equals."""
    worst = regrets.max(axis=1)
    return fastest if worst[fastest] <= worst.min() + 1e-9 else int(np.argmin(worst))


def _shrunk(work: Workload, devices: int) -> Workload:
    """Return ``work`` on ``devices`` devices with as many microbatches as stages need to be full."""
    data = devices // (work.tensor_size * work.pipeline_size * work.context_size)
    microbatches = min(work.num_microbatches, 4 * work.pipeline_size)
    return dataclasses.replace(
        work,
        num_devices=devices,
        devices_per_node=min(work.devices_per_node, devices),
        data_size=data,
        global_batch=data * work.micro_batch * microbatches,
    )


def _runs(works: Sequence[Workload]) -> list[tuple[int, Workload]]:
    """Return the possible runs: each plan without replicas, on two nodes, and unchanged, with few microbatches."""
    found = []
    for index, work in enumerate(works):
        ranks = work.tensor_size * work.context_size
        least = ranks * work.pipeline_size * max(1, math.ceil(work.expert_size * work.expert_tensor_size / ranks))
        sizes = {min(least, work.num_devices), work.num_devices}
        two_nodes = 2 * work.devices_per_node
        if least <= two_nodes < work.num_devices and two_nodes % least == 0:
            sizes.add(two_nodes)
        found += [(index, _shrunk(work, size)) for size in sorted(sizes)]
    return found


def _experiments(
    works: Sequence[Workload],
    device: Device,
    stack: str,
    names: Sequence[str],
    times: NDArray[np.float64],
    slopes: NDArray[np.float64],
    deviations: NDArray[np.float64],
) -> tuple[Experiment, ...]:
    """Choose up to three experiments, each with the most regret removed per device second."""
    candidates = _runs(works)
    runs = [run for _, run in candidates]
    own = _slopes(runs, device, stack, names)
    costs = [run.num_devices * _STEPS * price(run, device).step.total_us / 1e6 for run in runs]
    precision = np.diag(1 / deviations**2)
    chosen: list[Experiment] = []
    regret = float(_regrets(times, slopes, deviations).max(axis=1).min())
    while len(chosen) < _MOST_EXPERIMENTS and regret > _SETTLED:
        before = np.sqrt(np.diag(np.linalg.inv(precision)))
        options = []
        for index in range(len(runs)):
            after = precision + np.outer(own[index], own[index]) / _NOISE**2
            spread = np.sqrt(np.diag(np.linalg.inv(after)))
            left = float(_regrets(times, slopes, spread).max(axis=1).min())
            options.append(((regret - left) / costs[index], index, left, after, spread))
        gain, index, left, after, spread = max(options, key=lambda option: option[0])
        if gain <= 0:
            break
        halved = tuple(name for name, new, old in zip(names, spread, before, strict=True) if new < old / 2)
        chosen.append(
            Experiment(
                candidate=candidates[index][0],
                work=runs[index],
                device_seconds=costs[index],
                worst_regret_after=left,
                narrows=halved,
            )
        )
        precision, regret = after, left
    return tuple(chosen)
