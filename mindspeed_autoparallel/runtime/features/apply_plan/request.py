"""The plan of ``--auto-parallel-plan``, checked against the host's model and the number of processes."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.runtime.features.apply_plan.own_run import calibration_file
from mindspeed_autoparallel.runtime.flags.switches import HETERO, HETERO_BESIDE
from mindspeed_autoparallel.runtime.megatron.description import Description, describe
from mindspeed_autoparallel.runtime.megatron.features import flags_that_are_true
from mindspeed_autoparallel.runtime.megatron.unsearched import refuse_sharded_parameters
from mindspeed_autoparallel.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The plan to train under."""

    path: Path
    plan: Plan
    description: Description
    calibration_file: Path | None
    """Device file that the first steps calibrate, or ``None``."""


def read_request(arguments: argparse.Namespace) -> PlanRequest:
    """Read ``arguments.auto_parallel_plan``; ``PlanError`` if it does not fit the model or the world."""
    path = Path(arguments.auto_parallel_plan)
    plan = Plan.read(path)
    _refuse_other_layouts(plan, arguments, path)
    calibrated = calibration_file(arguments)
    if not plan.layout.sharding:
        refuse_sharded_parameters(arguments, "--auto-parallel-plan")
    description = describe(arguments)
    check_model(plan, description, path)
    _check_world(plan, path)
    return PlanRequest(path=path, plan=plan, description=description, calibration_file=calibrated)


def _refuse_other_layouts(plan: Plan, arguments: argparse.Namespace, path: Path) -> None:
    """Raise ``PlanError`` if encoders are to have layouts of their own and ``plan`` has one layout for all modules."""
    given = [flag for flag in flags_that_are_true(arguments) if flag in (HETERO, HETERO_BESIDE)]
    if given and plan.hetero is None:
        raise PlanError(
            f"{path} has one layout for all modules ({plan.layout.label()}), and {given[0]} gives encoders their own: "
            "drop the flag, or train with the hetero_plan.json of the search."
        )


def check_model(plan: Plan, description: Description, path: Path) -> None:
    """Raise ``PlanError`` if ``plan`` was made for another model than the host's."""
    if plan.profile.model_hash and plan.profile.model_hash != description.model_hash:
        planned = ", ".join(f"{module.name} {module.num_layers} layers" for module in plan.model.modules)
        given = ", ".join(f"{module.name} {module.num_layers} layers" for module in description.modules)
        raise PlanError(
            f"{path} was made for another model (hash {plan.profile.model_hash[:12]}, this one is "
            f"{description.model_hash[:12]}): planned {planned}; given {given}. Search again with "
            "--auto-parallel-mm, or give the flags and model.json the plan was made with."
        )


def _check_world(plan: Plan, path: Path) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != plan.layout.num_devices:
        raise PlanError(
            f"{path} is for {plan.layout.num_devices} devices ({plan.layout.label()}), but {world_size} processes were "
            f"started. Start {plan.layout.num_devices}, or search for a plan for {world_size} devices with "
            "--simulated-nnodes and --simulated-nproc-per-node."
        )
