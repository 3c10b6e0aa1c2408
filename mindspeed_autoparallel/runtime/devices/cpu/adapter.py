"""The CPU as a training device: for planning rigs, tests and machines without an accelerator."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.adapter import MemoryProbe, is_host_shortage
from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits
from mindspeed_autoparallel.units import MIB

MEMORY_VARIABLE = "MINDSPEED_AUTOPARALLEL_CPU_MEMORY_MIB"
"""Emulated capacity of one process; exceeding it inside a tracked region is an out-of-memory error."""


class CpuAdapter:
    """Communicates with gloo, times on the host's clock, and counts memory by tracking storages."""

    name = "cpu"
    backend = "gloo"

    def __init__(self) -> None:
        self._edits: Edits | None = None

    def prepare(self) -> None:
        """Install the torch.cuda facade and the Megatron edits; a second call does nothing."""
        if self._edits is not None:
            return
        self._edits = edits = Edits()
        # Megatron's fused functions use torch.compile, which looks for a GPU driver.
        edits.set_variable_default("TORCHDYNAMO_DISABLE", "1")
        # Megatron checks this for tensor parallel.
        edits.set_variable_default("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        from mindspeed_autoparallel.runtime.devices.cpu import communication, facade, megatron, tensors

        tensors.install(edits)
        facade.install(edits, self.total_memory_bytes())
        communication.install(edits)
        megatron.install(edits)

    def undo(self) -> list[str]:
        """Restore everything ``prepare`` replaced; return the names left alone because other code has replaced them
        since."""
        edits, self._edits = self._edits, None
        if edits is None:
            return []
        edits.undo()
        return edits.left_in_place

    def synchronize(self) -> None:
        """Return at once: calls on the CPU are synchronous."""

    def clock(self) -> Any:
        """Return the host's monotonic clock, in seconds."""
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return ``end - start``, in seconds."""
        return float(end - start)

    @contextlib.contextmanager
    def tracked_memory(self) -> Iterator[MemoryProbe]:
        """Track every storage; operators take several times longer, so time nothing inside."""
        from mindspeed_autoparallel.runtime.devices.cpu.storages import TrackedStorages

        limit = self._emulated_bytes()
        with TrackedStorages(limit) as storages:
            yield storages

    def reserved_bytes(self) -> int | None:
        """Return ``None``: the host has no caching allocator to read."""
        return None

    def total_memory_bytes(self) -> int:
        """Return the emulated capacity, or an equal share of the machine's memory for each local process."""
        emulated = self._emulated_bytes()
        if emulated is not None:
            return emulated
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(physical // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether ``error`` is a host shortage, or a ``RuntimeError`` with an out-of-memory message."""
        return is_host_shortage(error) or (isinstance(error, RuntimeError) and "out of memory" in str(error).lower())

    def fingerprint(self) -> dict[str, str]:
        """Return the machine, the number of cores and of threads, and torch's release."""
        import torch

        return {
            "device": f"cpu {platform.machine()}",
            "num_cores": str(os.cpu_count()),
            "num_threads": os.environ.get("OMP_NUM_THREADS", ""),
            "torch": str(torch.__version__),
        }

    def _emulated_bytes(self) -> int | None:
        text = os.environ.get(MEMORY_VARIABLE)
        if not text:
            return None
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(f"{MEMORY_VARIABLE} must be a positive number of MiB, got {text!r}.")
        return int(text) * MIB
