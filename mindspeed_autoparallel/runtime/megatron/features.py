"""Which function takes over after the host has parsed its arguments, per feature."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from typing import cast

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.patching import ENGINE

TASK_VARIABLE = "MINDSPEED_AUTOPARALLEL_TASK"
"""Set only in processes this package starts: the file that says what the process is to measure."""

TASK_HANDLERS = {
    "measure": "mindspeed_autoparallel.runtime.profiling.measure.worker:prepare",
    "trace": "mindspeed_autoparallel.runtime.profiling.trace.worker:prepare",
    "calibrate": "mindspeed_autoparallel.runtime.profiling.calibrate.worker:prepare",
    "verify": "mindspeed_autoparallel.runtime.features.auto_tuning.verify_worker:prepare",
}
"""Kind of task -> ``module:function(arguments, task)``."""

FEATURES = {
    "auto_parallel_mm": "mindspeed_autoparallel.runtime.features.auto_parallel_mm.entry:search_and_exit",
    "auto_parallel_plan": "mindspeed_autoparallel.runtime.features.apply_plan.entry:apply_plan",
    "hetero_parallel": "mindspeed_autoparallel.runtime.features.hetero_parallel.entry:prepare",
    "auto_tuning": "mindspeed_autoparallel.runtime.features.auto_tuning.entry:tune_and_exit",
    "operator_search": "mindspeed_autoparallel.runtime.features.operator_search.entry:search_and_exit",
    "operator_plan": "mindspeed_autoparallel.runtime.features.operator_search.entry:apply_plan",
}
"""Destination of the flag -> ``module:function(arguments)``; called in this order for the flags that are set."""

_ONE_JOB = ("auto_parallel_mm", "auto_tuning", "operator_search", "auto_parallel_plan", "operator_plan")
"""Some of them search and end, the plans train."""


def after_parsing(arguments: argparse.Namespace) -> None:
    """Hand the parsed ``arguments`` to the task of this process, or to the features switched on."""
    task_file = os.environ.get(TASK_VARIABLE)
    if task_file:
        from pathlib import Path

        from mindspeed_autoparallel.files import read_json

        ENGINE.require(TASK_VARIABLE)
        task = read_json(Path(task_file), "task of this process")
        ENGINE.enable({TASK_VARIABLE, *flags_that_are_true(arguments)})
        _load(TASK_HANDLERS[task["kind"]])(arguments, task)
        return
    jobs = [_flag(destination) for destination in _ONE_JOB if getattr(arguments, destination, None)]
    if len(jobs) > 1:
        raise ConfigError(
            f"{' and '.join(jobs)} were given together. Search first, then train by what was found "
            "(--auto-parallel-plan or --operator-plan) in a run of its own."
        )
    for destination, handler in FEATURES.items():
        if getattr(arguments, destination, None):
            ENGINE.require(_flag(destination))
            ENGINE.enable({_flag(destination)})
            _load(handler)(arguments)


def flags_that_are_true(arguments: object) -> list[str]:
    """The switches of ours that are on in ``arguments``, however they became so."""
    return [_flag(destination) for destination in FEATURES if getattr(arguments, destination, None)]


def _flag(destination: str) -> str:
    return "--" + destination.replace("_", "-")


def _load(path: str) -> Callable[..., None]:
    module, _, name = path.partition(":")
    return cast("Callable[..., None]", getattr(importlib.import_module(module), name))
