"""Maps each feature and task to the function that starts it once the host has parsed its arguments."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import cast

from mindspeed_autoparallel.errors import ConfigError, told_in_a_line
from mindspeed_autoparallel.patching import ENGINE
from mindspeed_autoparallel.runtime.first_rank import print_once
from mindspeed_autoparallel.runtime.flags.switches import HETERO, HETERO_BESIDE, SWITCHES
from mindspeed_autoparallel.runtime.state import of_process

TASK_VARIABLE = "MINDSPEED_AUTOPARALLEL_TASK"
"""Set only in processes this package starts: the file with the measuring task of the process."""

ALONE_VARIABLE = "MINDSPEED_AUTOPARALLEL_ALONE"
"""Set in processes that run one rank alone: the size of the emulated world. Their process groups are fake even before
Megatron is imported."""

TASK_HANDLERS = {
    "measure": "mindspeed_autoparallel.runtime.profiling.measure.worker:prepare",
    "trace": "mindspeed_autoparallel.runtime.profiling.trace.worker:prepare",
    "calibrate": "mindspeed_autoparallel.runtime.profiling.calibrate.worker:prepare",
    "links": "mindspeed_autoparallel.runtime.profiling.calibrate.worker:sample_links_and_exit",
    "verify": "mindspeed_autoparallel.runtime.features.auto_tuning.verify_worker:prepare",
    "preflight": "mindspeed_autoparallel.runtime.features.preflight.apply:prepare",
}
"""Kind of task -> ``module:function(arguments, task)``."""
_THEN_FEATURES = ("preflight",)
"""Kinds of tasks that run the training itself: its features start after the task's handler."""

_MINDSPEED_MM_ADAPTERS = "mindspeed_autoparallel.runtime.hetero.adapters.mindspeed_mm:"

_KEEPERS = (
    "mindspeed_autoparallel.runtime.hetero.job:current_job",
    "mindspeed_autoparallel.runtime.profiling.measure.worker:measuring",
)
"""``module:function`` that return the objects which hold the host's training arguments."""


class Parses:
    """Changes that the features made to this process's arguments, for hosts that parse them more than once."""

    def __init__(self) -> None:
        self.command: tuple[str, ...] | None = None
        self.changes: dict[str, object] = {}
        self.flags_of_host: frozenset[str] = frozenset()
        """Names of flags of ours that the host's parser had already."""
        self.unwatched: set[str] = set()
        """Lines already printed about functions that a feature cannot watch."""

    def is_repeated(self) -> bool:
        """Return whether the features have already processed this command line."""
        return self.command == _command()

    def hand_over(self, arguments: argparse.Namespace, features: Callable[[argparse.Namespace], None]) -> None:
        """Call ``features`` and record its changes."""
        before = dict(vars(arguments))
        features(arguments)
        missing = object()
        self.changes = {name: value for name, value in vars(arguments).items() if before.get(name, missing) != value}
        self.command = _command()

    def repeat(self, arguments: argparse.Namespace) -> None:
        """Apply the recorded changes to ``arguments``; give these to the objects that hold the earlier arguments."""
        vars(arguments).update(self.changes)
        for path in _KEEPERS:
            module, _, name = path.partition(":")
            if module in sys.modules:
                getattr(sys.modules[module], name)().arguments = arguments


def _command() -> tuple[str, ...]:
    return (os.environ.get(TASK_VARIABLE, ""), *sys.argv)


def after_parsing(arguments: argparse.Namespace, flags_of_host: Collection[str] = ()) -> None:
    """Pass the parsed ``arguments`` to the task of this process, or to the enabled features.

    ``flags_of_host``: names of flags of ours that the host's parser had already. Some hosts parse twice: features
    start once, and later arguments get the same changes.
    """
    parses = of_process(Parses)
    if parses.is_repeated():
        parses.repeat(arguments)
        return
    parses.flags_of_host = frozenset(flags_of_host)
    parses.hand_over(arguments, _start)


def _start(arguments: argparse.Namespace) -> None:
    task_file = os.environ.get(TASK_VARIABLE)
    if task_file:
        from pathlib import Path

        from mindspeed_autoparallel.files import read_json

        _enable(TASK_VARIABLE, *flags_that_are_true(arguments))
        task = read_json(Path(task_file), "task of this process")
        _load(TASK_HANDLERS[task["kind"]])(arguments, task)
        if task["kind"] in _THEN_FEATURES:
            _start_features(arguments)
        return
    _leave_hosts_hetero_parallel(arguments)
    on = flags_that_are_true(arguments)
    jobs = [switch.flag for switch in SWITCHES if switch.is_job and switch.flag in on]
    if len(jobs) > 1:
        raise ConfigError(
            f"{' and '.join(jobs)} were given together. Search first, then train with what was found "
            "(--auto-parallel-plan or --operator-plan) in a run of its own."
        )
    _start_features(arguments)


def _start_features(arguments: argparse.Namespace) -> None:
    started: set[str] = set()
    # A feature may switch on a later one (a plan whose encoders have their own layouts).
    while waiting := [
        one for one in SWITCHES if one.start not in started and one.flag in flags_that_are_true(arguments)
    ]:
        first = waiting[0]
        started.add(first.start)
        if first.is_own_launcher and ("TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", 1)) > 1):
            raise ConfigError(
                f"{first.flag} starts its own processes: start the script once per node with plain python instead of "
                "torchrun."
            )
        _enable(*(switch.flag for switch in waiting if switch.start == first.start))
        _load(first.start)(arguments)


def _leave_hosts_hetero_parallel(arguments: argparse.Namespace) -> None:
    """Print that the host's own ``--hetero-parallel`` is left to it; ``ConfigError`` with a feature of this package."""
    if HETERO not in of_process(Parses).flags_of_host or not getattr(arguments, "hetero_parallel", False):
        return
    ours = [flag for flag in flags_that_are_true(arguments) if flag != "--auto-parallel-plan"]
    if ours:
        raise ConfigError(
            f"{HETERO} is this host's own flag and cannot be combined with {', '.join(ours)}. Leave it out, "
            f"and give {HETERO_BESIDE} for layouts of this package."
        )
    print_once(
        f"mindspeed_autoparallel: {HETERO} is this host's own flag and keeps its meaning; for ours, give "
        f"{HETERO_BESIDE} instead.",
        to_stderr=True,
    )


def hetero_flag(model: Mapping[str, object] | None = None) -> str:
    """Return the flag that enables this package's hetero parallel.

    ``model``: model.json, whose adapters identify the host if none is running, as on the command line.
    """
    of_host = HETERO in of_process(Parses).flags_of_host
    return HETERO_BESIDE if of_host or _MINDSPEED_MM_ADAPTERS in json.dumps(model or {}, default=str) else HETERO


def flags_that_are_true(arguments: object) -> list[str]:
    """Return this package's switches that are on in ``arguments``, regardless of how they were set."""
    on = [switch for switch in SWITCHES if getattr(arguments, switch.destination, None)]
    of_host = of_process(Parses).flags_of_host
    return [switch.flag for switch in on if not switch.may_be_hosts or switch.flag not in of_host]


def verify_patches() -> None:
    """Check again when training begins: hosts apply their own patches after they have parsed their arguments.

    Ends the process with a one-line error if a function that a feature works through was replaced.
    """
    with told_in_a_line():
        for flag in sorted(ENGINE.enabled):
            _verify(flag)


def _enable(*flags: str) -> None:
    for flag in flags:
        ENGINE.require(flag)
    ENGINE.enable(flags)
    for flag in flags:
        _verify(flag)


def _verify(flag: str) -> None:
    """Check the functions that ``flag`` works through; print those that it cannot watch, each once."""
    told = of_process(Parses).unwatched
    for line in ENGINE.verify(flag):
        if line not in told:
            print_once(line, to_stderr=True)
        told.add(line)


def _load(path: str) -> Callable[..., None]:
    module, _, name = path.partition(":")
    return cast("Callable[..., None]", getattr(importlib.import_module(module), name))
