"""The user's training for a few iterations only, without the batches that Megatron keeps to run a step again."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.cpu.edits import replaced

_OFF = {
    **dict.fromkeys(("load", "save", "pretrained_checkpoint", "tensorboard_dir", "wandb_project")),
    **dict.fromkeys(("train_samples", "lr_decay_samples", "lr_wsd_decay_samples")),
    "lr_warmup_samples": 0,
    "lr_warmup_iters": 0,
    "eval_iters": 0,
    "lr_warmup_fraction": None,
    "lr_decay_style": "constant",
    "rampup_batch_size": None,
}
"""Files, length, schedule and batch sizes of the training. Megatron refuses sample counts together with iterations."""


def train_for(arguments: argparse.Namespace, num_iterations: int) -> None:
    """Make Megatron train for ``num_iterations`` of the full global batch, without loading, saving or evaluating.

    It counts iterations even if the script counts samples.
    """
    for name, value in _OFF.items():
        if hasattr(arguments, name):
            setattr(arguments, name, value)
    arguments.train_iters = num_iterations


def batch_ramp(arguments: argparse.Namespace, global_batch_size: int) -> range:
    """Return the smaller global batches that ``--rampup-batch-size`` trains in front of ``global_batch_size``.

    Megatron asserts that every one is divisible by DP x MBS. Empty where it makes them so
    (``--decrease-batch-size-if-needed``), and from 0.18 on, which ignores the flag. Raises ``ConfigError`` for values
    that Megatron refuses.
    """
    given = getattr(arguments, "rampup_batch_size", None)
    if not given or hasattr(arguments, "step_batch_size_schedule"):
        return range(0)
    try:
        start, increment, _ = map(int, given)
    except ValueError:
        start, increment = 0, 0
    if start < 1 or increment < 1 or start >= global_batch_size or (global_batch_size - start) % increment:
        raise ConfigError(
            f"--rampup-batch-size {' '.join(map(str, given))} must be START INCREMENT SAMPLES, with START and a whole "
            f"number of INCREMENTs above it making the global batch of {global_batch_size}."
        )
    if getattr(arguments, "decrease_batch_size_if_needed", False):
        return range(0)
    return range(start, global_batch_size, increment)


@contextlib.contextmanager
def without_kept_batches(data_iterator: Any = None) -> Iterator[None]:
    """Disable Megatron's rerun machine, so that memory tracking does not count the batches that it keeps.

    ``data_iterator``: the step's, or one per virtual stage; batches kept of the previous step are released now, as the
    machine itself does when a step begins.
    """
    try:
        from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine
    except ImportError:  # releases without it keep no batches
        yield
        return
    machine = get_rerun_state_machine()
    for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
        if isinstance(iterator, RerunDataIterator) and not iterator.replaying:
            iterator.advance()
    with replaced(machine, "mode", RerunMode.DISABLED):
        yield
