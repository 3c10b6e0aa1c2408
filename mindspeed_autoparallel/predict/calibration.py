"""Calibrates a device's figures with a user's training logs.

Each log is one observation: the run that its arguments describe, and the median step. The catalogue's figures are the
prior: a figure that the steps do not determine keeps its value, as its standard deviation shows. New figures are kept
only if figures fitted to the other logs predict no log worse. A single log, which no other can check, changes figures
only if its step is outside of the catalogue's interval. Observations are stored in the device's file, so that a later
log adds to them and none counts twice.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import read_device, write_device
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.confidence import half_width
from mindspeed_autoparallel.predict.fitting import Free, Solution, predicted_ms, solve, values_of, with_values
from mindspeed_autoparallel.predict.observations import HOST_TIMES, SHARES, Observation
from mindspeed_autoparallel.predict.price import first_step_bytes, price
from mindspeed_autoparallel.predict.training_log import TrainingLog
from mindspeed_autoparallel.profiles.records import read_record

_MODEL_ERRORS = (0.02, 0.1)
"""Relative errors of one observation in addition to its scatter: errors of the formulas between layouts of one model,
and between models."""
_SHARES_KEPT = (1.0, 0.5)
"""Possible shares of the change from the catalogue's figures to the fitted ones."""
_SHARE_OF_ONE = 0.5
"""The same of a single log."""
_LEAST_GAIN = 0.1
"""Smallest share of the mean error that a change must remove."""
_NO_WORSE = 0.005
"""Largest growth of a single log's error that counts as no worse."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Calibrated:
    """The part of a device file that lists its calibration's sources."""

    observations: tuple[Observation, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The changes by a calibration."""

    device: Device
    stack: str
    deviations: Mapping[str, float]
    """Relative standard deviation of every figure that was fitted; empty if nothing is kept."""
    before: tuple[float, ...]
    """Relative error of every observation with the figures before."""
    after: tuple[float, ...]
    left_out: tuple[float, ...]
    """The same, each observation predicted from all others; empty for one."""
    share: float
    """Share of the change to the fitted figures that is kept."""
    kept: str
    """The same as text, with the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Choice:
    """A possible calibration, with the error of each observation predicted from the others."""

    model_error: float
    share: float
    errors: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Return the mean size of the errors."""
        return sum(map(abs, self.errors)) / len(self.errors)


def peak_errors(log: TrainingLog, work: Workload, device: Device) -> dict[int, tuple[float, float]]:
    """Return (predicted, measured) GiB of each rank's peak that ``log`` reports, in the first step."""
    ranks = work.num_devices // work.pipeline_size
    memory = price(work, device).memory
    return {
        rank: (first_step_bytes(memory[rank // ranks], work) / 2**30, measured)
        for rank, measured in sorted(log.peak_gib.items())
        if rank // ranks < work.pipeline_size
    }


def calibrate_device(device: Device, observations: Sequence[Observation]) -> Calibration:
    """Return ``device`` with figures fitted to ``observations``, all of one software stack."""
    works = [observation.work for observation in observations]
    stacks = {work.stack for work in works}
    if len(stacks) != 1:
        raise ConfigError(
            f"the logs come from several software stacks: {', '.join(sorted(stacks))}; calibrate each separately."
        )
    stack = stacks.pop()
    free = free_figures(device, stack, works)
    measured = np.array([observation.step_ms for observation in observations])
    before = tuple((predicted_ms(device, works) / measured - 1).tolist())
    choice, kept = _chosen(device, stack, observations, before, free)
    solution = _solved(device, stack, observations, free, choice.model_error)
    learnt = _part_of_the_way(device, stack, solution, free, choice.share)
    deviations = {item.name: float(value) for item, value in zip(free, solution.deviation, strict=True)}
    return Calibration(
        device=learnt,
        stack=stack,
        deviations=deviations if choice.share else {},
        before=before,
        after=tuple((predicted_ms(learnt, works) / measured - 1).tolist()),
        left_out=choice.errors,
        share=choice.share,
        kept=kept,
    )


def _chosen(
    device: Device, stack: str, observations: Sequence[Observation], before: Sequence[float], free: Sequence[Free]
) -> tuple[_Choice, str]:
    """Return the share of the change to keep for ``observations``, and the reason as text."""
    if len(observations) == 1:
        width = half_width(observations[0].work, device)[0]
        inside = 1 / (1 + width) <= 1 / (1 + before[0]) <= 1 + width
        if inside:
            return _Choice(model_error=_MODEL_ERRORS[0], share=0.0), (
                f"nothing: the only log is within the +-{width:.0%} uncertainty of such predictions, and no "
                "other log checks it; add two more"
            )
        return _Choice(model_error=_MODEL_ERRORS[0], share=_SHARE_OF_ONE), (
            f"half of the change by the only log: it is outside the +-{width:.0%} of such predictions, and no other "
            "log checks it; add two more"
        )
    choices = _tried(device, stack, observations, free)
    best = min(choices, key=lambda choice: choice.mean)
    old = sum(map(abs, before)) / len(before)
    worse = [abs(new) > abs(known) + _NO_WORSE for new, known in zip(best.errors, before, strict=True)]
    if best.mean <= (1 - _LEAST_GAIN) * old and not any(worse):
        return best, (
            f"{best.share:.0%} of the way to the fitted figures: the others predict each omitted log no "
            f"worse than the former figures, on average {best.mean:.1%} off instead of {old:.1%}"
        )
    reason = f"{sum(worse)} of {len(worse)} logs are predicted worse by the figures from the others"
    if not any(worse):
        reason = f"omitted logs are {best.mean:.1%} off with the figures from the others, {old:.1%} without"
    nothing = dataclasses.replace(best, share=0.0, errors=tuple(before))
    return nothing, f"nothing: {reason}; logs of the same model on the same machine agree better"


def _tried(device: Device, stack: str, observations: Sequence[Observation], free: Sequence[Free]) -> list[_Choice]:
    """Return all possible calibrations with the error of each observation predicted from the others."""
    found = []
    for error in _MODEL_ERRORS:
        errors: dict[float, list[float]] = {share: [] for share in _SHARES_KEPT}
        for index, observation in enumerate(observations):
            others = [item for number, item in enumerate(observations) if number != index]
            solution = _solved(device, stack, others, free, error)
            for share, missed in errors.items():
                other = _part_of_the_way(device, stack, solution, free, share)
                missed.append(float(predicted_ms(other, [observation.work])[0] / observation.step_ms - 1))
        found += [_Choice(model_error=error, share=share, errors=tuple(missed)) for share, missed in errors.items()]
    return found


def _part_of_the_way(device: Device, stack: str, solution: Solution, free: Sequence[Free], share: float) -> Device:
    """Return ``device`` with figures ``share`` of the way, in logarithms, from its own to the fitted ones."""
    if not share:
        return device
    start = np.log([item.start for item in free])
    point = start + share * (solution.point - start)
    return values_of(device, stack, dataclasses.replace(solution, point=point), free)


def free_figures(device: Device, stack: str, works: Sequence[Workload]) -> tuple[Free, ...]:
    """Return the figures that ``works`` depend on, with the device's own as their start."""
    efficiency = device.efficiency(stack)
    used = {**SHARES, **HOST_TIMES}
    if not any(work.model.num_experts for work in works):
        used.pop("expert_fraction")
    if not any(work.num_devices > work.devices_per_node for work in works):
        used.pop("inter_fraction")
    if not any(work.pipeline_size > 1 for work in works):
        used.pop("point_to_point_us")
    if not any(work.tensor_size > 1 for work in works):
        used.pop("tensor_launch_us")
    return tuple(
        Free(name, getattr(efficiency, name), deviation, 0.98 if name in SHARES else math.inf)
        for name, deviation in used.items()
    )


def _solved(
    device: Device, stack: str, observations: Sequence[Observation], free: Sequence[Free], model_error: float
) -> Solution:
    works = [observation.work for observation in observations]
    measured = np.array([observation.step_ms for observation in observations])
    error = np.array([math.hypot(model_error, observation.spread) for observation in observations])
    return solve(device, stack, works, measured, error, free, plain=True)


def add_observation(path: Path, device: Device, observation: Observation) -> Calibration:
    """Fit ``device``'s figures to the observations in ``path`` and to ``observation``, and store them in ``path``.

    An earlier observation of the same source is replaced. Raises ``ConfigError`` if ``path`` is a file of another
    device, or one that no calibration wrote, which must not be overwritten.
    """
    known = observations_to_extend(path, device)
    taken = [item for item in known if item.source != observation.source] + [observation]
    result = calibrate_device(device, taken)
    store(path, result, taken, device)
    return result


def observations_to_extend(path: Path, device: Device) -> list[Observation]:
    """Return the observations of ``path``, a file that ``device``'s figures may be stored in; none if the file does not
    exist. Raises ``ConfigError`` if ``path`` is a file of another device, or one that no calibration wrote.
    """
    known = stored_observations(path)
    if path.exists():
        held = read_device(path).name
        if held != device.name:
            raise ConfigError(f"{path} is for {held}, this run trained on {device.name}; give another file.")
        if not known:
            raise ConfigError(f"{path} has no observations: it is not a calibrated file and is not overwritten.")
    return known


def stored_observations(path: Path) -> list[Observation]:
    """Return the observations that a calibrated device's file holds; raises ``ConfigError`` for a broken one."""
    if not path.exists():
        return []
    return list(read_record(path, "device file", _Calibrated).observations)


def store(path: Path, calibration: Calibration, observations: Sequence[Observation], base: Device) -> None:
    """Write the calibrated device to ``path``, atomically, with the sources of its figures."""
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    error = calibration.left_out or calibration.after
    told = {
        "relative_error": round(sum(map(abs, error)) / len(error), 4),
        "uncertainty": {name: round(value, 4) for name, value in calibration.deviations.items()},
        "provenance": f"calibrated on {day} from {len(observations)} logs: "
        f"{'; '.join(item.source for item in observations)}; kept: {calibration.kept}; undetermined figures are "
        f"{base.name}'s: "
        f"{base.efficiency(calibration.stack).provenance}",
    }
    device = with_values(calibration.device, calibration.stack, told)
    write_device(path, device, [dataclasses.asdict(observation) for observation in observations])
