"""The user's training for a few iterations only, without the batches that Megatron keeps to run a step again."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

_OFF = {
    "train_samples": None,
    "lr_decay_samples": None,
    "lr_wsd_decay_samples": None,
    "lr_warmup_samples": 0,
    "lr_warmup_iters": 0,
    "eval_iters": 0,
    "lr_warmup_fraction": None,
    "lr_decay_style": "constant",
    "rampup_batch_size": None,
}
"""Length, schedule and batch sizes of the whole training. Megatron refuses sample counts together with iterations."""


def train_for(arguments: argparse.Namespace, num_iterations: int) -> None:
    """Make Megatron train for ``num_iterations`` of the full global batch, even if the script counts samples."""
    for name, value in _OFF.items():
        if hasattr(arguments, name):
            setattr(arguments, name, value)
    arguments.train_iters = num_iterations


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
    before, machine.mode = machine.mode, RerunMode.DISABLED
    try:
        yield
    finally:
        machine.mode = before
