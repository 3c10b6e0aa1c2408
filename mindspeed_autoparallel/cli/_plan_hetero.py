"""``plan --hetero-parallel``: both searches, the comparison, and the model.json to train with."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.cli._progress import code_after_interrupt, progress_of
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.interrupts import Stopped
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Plan

if TYPE_CHECKING:
    from mindspeed_autoparallel.planner.wanted import Wanted


def run_hetero(arguments: argparse.Namespace, profile: Profile, wanted: Wanted, finish: Callable[[Plan], None]) -> int:
    """Search, print, write; return the exit code. ``finish`` writes and prints a plan without hetero layouts."""
    from mindspeed_autoparallel.planner.hetero.compare import (
        Comparison,
        HeteroOptions,
        OnlyHomogeneous,
        comparison_result,
        summary,
        write_comparison,
    )
    from mindspeed_autoparallel.planner.results import PROFILE_FILE
    from mindspeed_autoparallel.planner.wanted import find_plan
    from mindspeed_autoparallel.report import render_table
    from mindspeed_autoparallel.runtime.features.apply_plan.hetero_model import (
        can_stage_encoders,
        training_flags,
        write_hetero_model,
    )
    from mindspeed_autoparallel.runtime.megatron.description import describe
    from mindspeed_autoparallel.spec import to_json

    stages = profile.memory_semantics != "mindspeed"
    if arguments.mm_model is not None:
        description = describe(argparse.Namespace(mm_model=arguments.mm_model))
        _check_modules(profile, {module.name: module.num_layers for module in description.modules}, arguments.mm_model)
        stages = can_stage_encoders(description)
    try:
        hetero = HeteroOptions(balance=arguments.hetero_balance, encoder_pipelines=stages)
        comparison = find_plan(profile, replace(wanted, hetero=hetero), progress_of(arguments))
        assert isinstance(comparison, Comparison)
    except OnlyHomogeneous as error:
        print(f"no hetero plan: {error}", file=sys.stderr)
        finish(error.plan)
        return 0
    except Stopped as stopped:
        code = code_after_interrupt(stopped)
        finish(stopped.plan)
        return code
    model_file = None
    if arguments.mm_model is not None:
        model_file = write_hetero_model(comparison.hetero, description, arguments.out or Path.cwd())
    named = str(model_file) if model_file is not None else None
    if arguments.out is not None:
        write_comparison(comparison, arguments.out, named)
        profile.write(arguments.out / PROFILE_FILE)
    if arguments.json:
        print(json.dumps({**comparison_result(comparison, named), "plan": to_json(comparison.best)}))
        return 0
    print(render_table(comparison.hetero, with_verdicts=arguments.why) + summary(comparison))
    if model_file is not None:
        print(f"train the hetero plan with: {training_flags(comparison.hetero, model_file, description)}")
    return 0


def _check_modules(profile: Profile, described: dict[str, int], path: Path) -> None:
    planned = {module.name: module.num_layers for module in profile.model.modules}
    if described != planned:
        raise ConfigError(f"--mm-model {path} has the layers {described}, the profile {planned}; they must agree.")
