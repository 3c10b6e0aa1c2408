"""Runs in a verifying process: the user's training with a configuration, for a few measured steps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.features.apply_plan.check import MeasuredRank, PlanCheck
from mindspeed_autoparallel.runtime.features.apply_plan.own_run import add_run
from mindspeed_autoparallel.runtime.megatron.short_training import train_for
from mindspeed_autoparallel.runtime.state import of_process
from mindspeed_autoparallel.spec.plan import Plan

VERIFY_SCHEMA_VERSION = 1


def prepare(arguments: argparse.Namespace, data: dict[str, Any]) -> None:
    """Handle tasks of kind ``verify``: few steps, nothing loaded, saved or evaluated."""
    train_for(arguments, int(data["num_steps"]))
    if current_device().name == "cpu" and hasattr(arguments, "rerun_mode"):
        # The rerun state machine keeps a step's batches in host memory, which counts as device memory here.
        arguments.rerun_mode = "disabled"
    target, plan, calibrated = Path(data["result"]), Plan.parse(data["plan"], "plan"), data["calibration_file"]

    def keep(ranks: list[MeasuredRank]) -> None:
        told = add_run(Path(calibrated), arguments, plan, ranks) if calibrated else ""
        write_json_atomic(target, {"schema_version": VERIFY_SCHEMA_VERSION, "ranks": ranks, "calibration": told})

    of_process(PlanCheck).begin(plan, int(data["num_steps"]), keep)
