"""Megatron's rerun machine keeps every batch of a step in host memory, which on the CPU device is the device's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def without_kept_batches() -> Iterator[None]:
    """Switch the machine off inside, so that a followed step counts what a device with memory of its own would hold."""
    try:
        from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
    except ImportError:  # releases without it keep no batches
        yield
        return
    machine = get_rerun_state_machine()
    before, machine.mode = machine.mode, RerunMode.DISABLED
    try:
        yield
    finally:
        machine.mode = before
