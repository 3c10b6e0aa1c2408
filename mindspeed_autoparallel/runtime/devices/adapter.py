"""The operations that the runtime needs of any device."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

_HOST_SHORTAGE = ("can't allocate memory", "not enough memory")


def is_host_shortage(error: BaseException) -> bool:
    """Return whether ``error`` is Python's or torch's CPU error that host memory ran out."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in words for sign in _HOST_SHORTAGE)
    )


class MemoryProbe(Protocol):
    """Live bytes inside a ``tracked_memory()`` region."""

    def current_bytes(self) -> int:
        """Return the bytes that are live now."""

    def take_peak_bytes(self) -> int:
        """Return the highest number of live bytes since the region began or since the last call."""


class DeviceAdapter(Protocol):
    """One kind of device."""

    name: str
    """``npu``, ``cuda`` or ``cpu``."""
    backend: str
    """Communication backend for torch.distributed: ``hccl``, ``nccl``, ``gloo``."""

    def prepare(self) -> None:
        """Prepare the process; called once, right before Megatron is imported."""

    def synchronize(self) -> None:
        """Wait for everything submitted to the current device."""

    def clock(self) -> Any:
        """Return a point of the device's own timeline; see ``seconds_between``."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return seconds between two ``clock`` points; waits for the later one."""

    def tracked_memory(self) -> AbstractContextManager[MemoryProbe]:
        """Follow live tensor memory inside the region (what was live before it counts)."""

    def reserved_bytes(self) -> int | None:
        """Return the most bytes that the allocator has held so far; ``None`` without such an allocator."""

    def total_memory_bytes(self) -> int:
        """Return the bytes that one process may allocate."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether ``error`` means that the device has no memory left."""

    def fingerprint(self) -> dict[str, str]:
        """Return device and software, as far as they change a measurement."""


class CountedMemory:
    """A probe over an accelerator's own counters (``torch.cuda`` or ``torch.npu``)."""

    def __init__(self, current: Callable[[], int], peak: Callable[[], int], reset: Callable[[], None]) -> None:
        self._current, self._peak, self._reset = current, peak, reset

    def current_bytes(self) -> int:
        """Return the bytes that are live now."""
        return int(self._current())

    def take_peak_bytes(self) -> int:
        """Return the highest number of live bytes since the last call."""
        peak = int(self._peak())
        self._reset()
        return peak


def shared_cores(num_processes: int, num_cores: int | None = None) -> str:
    """Return ``4 processes share 2 cores`` where there are more processes than cores, else an empty string.

    ``num_cores``: of the machine that the processes ran on; by default this one's.
    """
    cores = num_cores or os.cpu_count() or 1
    return f"{num_processes} processes share {cores} cores" if num_processes > cores else ""
