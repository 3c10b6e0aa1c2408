"""The operations that the runtime needs of any device."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, Protocol

_HOST_SHORTAGE = ("can't allocate memory", "not enough memory")


def is_host_shortage(error: BaseException) -> bool:
    """Return whether ``error`` is a ``MemoryError`` or torch's failure to allocate host memory."""
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
        """Return a timestamp of the device's timeline, for ``seconds_between``."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds between two ``clock`` timestamps, after waiting for the later one."""

    def tracked_memory(self) -> AbstractContextManager[MemoryProbe]:
        """Track live tensor memory inside the region; tensors that are live at entry count too."""

    def reserved_bytes(self) -> int | None:
        """Return the most bytes that the allocator has held so far; ``None`` without such an allocator."""

    def total_memory_bytes(self) -> int:
        """Return the bytes that one process may allocate."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether ``error`` means that the device has no memory left."""

    def fingerprint(self) -> dict[str, str]:
        """Return the device and the software that a measurement depends on."""


def shared_cores(num_processes: int, num_cores: int | None = None) -> str:
    """Return ``4 processes share 2 cores`` if there are more processes than cores, else an empty string.

    ``num_cores``: cores of the machine that ran the processes; by default this machine's.
    """
    cores = num_cores or os.cpu_count() or 1
    return f"{num_processes} processes share {cores} cores" if num_processes > cores else ""
