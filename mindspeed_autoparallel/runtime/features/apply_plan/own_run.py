"""``--auto-parallel-calibrate``: calibrates the user's device file by the measured first steps of a run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.adapter import shared_cores
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.features.apply_plan.check import MeasuredRank
from mindspeed_autoparallel.runtime.profiling.calibrate.results import fingerprint_of
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.units import US_PER_MS

if TYPE_CHECKING:  # brings the planner along, which no rank needs without the flag
    from mindspeed_autoparallel.predict.calibration import Calibration
    from mindspeed_autoparallel.predict.observations import Observation

_FLAG = "--auto-parallel-calibrate"


def calibration_file(arguments: argparse.Namespace) -> Path | None:
    """Return the file of ``--auto-parallel-calibrate``; ``ConfigError`` if it could not be written after the run."""
    given = getattr(arguments, "auto_parallel_calibrate", None)
    if given is None:
        return None
    from mindspeed_autoparallel.predict.calibration import stored_observations

    path = Path(given).resolve()
    if not path.parent.is_dir():
        raise ConfigError(f"{_FLAG} {given}: there is no folder {path.parent}; create it first.")
    if path.exists() and not stored_observations(path):
        raise ConfigError(
            f"{_FLAG} {given}: the file holds no observations of runs, so it is not overwritten; give a new name."
        )
    return path


def add_run(path: Path, arguments: argparse.Namespace, plan: Plan, ranks: Sequence[MeasuredRank]) -> str:
    """Add the run of ``arguments`` to ``path`` and return a line about it, or why it cannot be added."""
    try:
        return _added(path, arguments, plan, ranks)
    except (ConfigError, OSError) as error:
        return f"this run was not added to {path}: {error}"


def _added(path: Path, arguments: argparse.Namespace, plan: Plan, ranks: Sequence[MeasuredRank]) -> str:
    from mindspeed_autoparallel.predict.calibration import add_observation
    from mindspeed_autoparallel.predict.observations import Observation, request_of_run

    if getattr(arguments, "mm_model", None) or len(plan.model.modules) > 1:
        raise ConfigError("only runs of language models calibrate a device; models with encoders are not predicted.")
    device, num_devices = current_device(), len(ranks)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_devices))
    if device.name == "cpu" and (shared := shared_cores(per_node)):
        raise ConfigError(f"{shared}, so its step does not measure the device.")
    base = find_device("CPU" if device.name == "cpu" else fingerprint_of(device).name)
    slowest = max(ranks, key=lambda rank: rank["step_us"])
    observation = Observation(
        request=request_of_run(vars(arguments), num_devices, base.name, per_node),
        step_ms=slowest["step_us"] / US_PER_MS,
        spread=slowest["step_spread"],
        source=f"own run {plan.layout.label()} of model {plan.profile.model_hash[:12]}",
    )
    return _told(path, observation, add_observation(path, base, observation))


def _told(path: Path, observation: Observation, result: Calibration) -> str:
    other = f", {result.left_out[-1]:+.1%} by the other runs alone" if result.left_out else ""
    return (
        f"added to {path} ({len(result.after)} runs): step {observation.step_ms:.1f} ms, the catalogue's prediction "
        f"was {result.before[-1]:+.1%} off, that of the file is {result.after[-1]:+.1%}{other}; "
        f"kept: {result.kept}; use it as --device-file"
    )
