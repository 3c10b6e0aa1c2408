"""The CPU as a training device: for planning rigs, tests and machines without an accelerator."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.adapter import MemoryProbe
from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits
from mindspeed_autoparallel.units import MIB

MEMORY_VARIABLE = "MINDSPEED_AUTOPARALLEL_CPU_MEMORY_MIB"
"""Emulated capacity of one process; exceeding it inside a tracked region is an out-of-memory error."""


class CpuAdapter:
    """gloo, wall clock, tracked storages."""

    name = "cpu"
    backend = "gloo"

    def __init__(self) -> None:
        self.edits = Edits()
        self._prepared = False

    def prepare(self) -> None:
        """Install the torch.cuda facade and the Megatron edits; once."""
        if self._prepared:
            return
        self._prepared = True
        # Megatron's fused functions are torch.compile'd, which looks for a GPU driver.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        # Megatron checks this for tensor parallel.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        from mindspeed_autoparallel.runtime.devices.cpu import communication, facade, megatron, tensors

        tensors.install(self.edits)
        facade.install(self.edits, self.total_memory_bytes())
        communication.install(self.edits)
        megatron.install(self.edits)

    def undo(self) -> None:
        """Restore everything ``prepare`` replaced."""
        self.edits.undo()
        self._prepared = False

    def synchronize(self) -> None:
        """Everything is done when the call returns."""

    def clock(self) -> Any:
        """Seconds."""
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds."""
        return float(end - start)

    @contextlib.contextmanager
    def tracked_memory(self) -> Iterator[MemoryProbe]:
        """Follow every storage; several times slower, so nothing is timed inside."""
        from mindspeed_autoparallel.runtime.devices.cpu.storages import TrackedStorages

        limit = self._emulated_bytes()
        with TrackedStorages(limit) as storages:
            yield storages

    def total_memory_bytes(self) -> int:
        """The emulated capacity, or an equal share of the machine's memory for each local process."""
        emulated = self._emulated_bytes()
        if emulated is not None:
            return emulated
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(physical // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """torch's message on CPU, Python's own, or the emulated capacity's."""
        words = str(error).lower()
        return isinstance(error, MemoryError) or "out of memory" in words or "not enough memory" in words

    def fingerprint(self) -> dict[str, str]:
        """Machine, core count and torch's release."""
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
