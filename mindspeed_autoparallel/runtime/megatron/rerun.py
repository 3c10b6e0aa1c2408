"""Megatron's rerun machine keeps every batch of a step in host memory, which on the CPU device is the device's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def without_kept_batches(data_iterator: Any = None) -> Iterator[None]:
    """Switch the machine off inside, so that a followed step counts what a device with memory of its own would hold.

    ``data_iterator``: the step's, or one per virtual stage; what they keep of the step before is let go of now, as the
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
