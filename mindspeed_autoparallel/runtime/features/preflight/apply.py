"""Set-up of a child process: a few steps of the user's training as one rank, without loading, saving or logging."""

from __future__ import annotations

import argparse
import os

from mindspeed_autoparallel.profiles.records import record_of
from mindspeed_autoparallel.runtime.devices.cpu.adapter import MEMORY_VARIABLE
from mindspeed_autoparallel.runtime.features.preflight.ranks import PreflightTask
from mindspeed_autoparallel.runtime.features.preflight.watch import watching
from mindspeed_autoparallel.runtime.megatron.short_training import train_for
from mindspeed_autoparallel.runtime.profiling import alone
from mindspeed_autoparallel.runtime.profiling.balanced_routing import balance_routing

_OFF: dict[str, object] = {
    **dict.fromkeys(("exit_interval", "exit_duration_in_mins", "auto_parallel_preflight")),
    # Received tensors hold random values, on which checks of losses and Megatron's rerun state machine could fail.
    "check_for_nan_in_loss_and_grad": False,
    "check_for_spiky_loss": False,
    "check_for_large_grads": False,
    "rerun_mode": "disabled",
    "log_throughput": False,
    "profile": False,
}


def prepare(arguments: argparse.Namespace, data: dict[str, object]) -> None:
    """Handle tasks of kind ``preflight``; the features of the plan and of the script start after it."""
    task = record_of(data["preflight"], "task of this process", PreflightTask)
    # Without a limit the child survives: the parent compares the peak with the limit and reports the excess.
    os.environ.pop(MEMORY_VARIABLE, None)
    alone.install()
    balance_routing(task.imbalance)
    for name, value in _OFF.items():
        if hasattr(arguments, name):
            setattr(arguments, name, value)
    train_for(arguments, task.num_steps)
    for name in task.switches:
        setattr(arguments, name, True)
    if task.plan:
        arguments.auto_parallel_plan = task.plan
    watching().task = task
