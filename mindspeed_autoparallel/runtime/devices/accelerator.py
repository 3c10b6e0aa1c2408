"""NPU and GPU: torch's device module with events, counters and properties."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.devices.adapter import MemoryProbe


class _CountedMemory:
    """A probe over the allocator's own counters."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def current_bytes(self) -> int:
        """Return the bytes that are live now."""
        return int(self._module.memory_allocated())

    def take_peak_bytes(self) -> int:
        """Return the highest number of live bytes since the last call."""
        peak = int(self._module.max_memory_allocated())
        self._module.reset_peak_memory_stats()
        return peak


class Accelerator:
    """An adapter over a device module that has ``torch.cuda``'s public names."""

    name = ""
    backend = ""

    def __init__(self, module: Any) -> None:
        self._module = module

    def prepare(self) -> None:
        """Do nothing: Megatron is written for accelerators."""

    def synchronize(self) -> None:
        """Wait for the current device."""
        self._module.synchronize()

    def clock(self) -> Any:
        """Return a timing event on the current stream."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds between two events, after waiting for ``end``."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    @contextlib.contextmanager
    def tracked_memory(self) -> Iterator[MemoryProbe]:
        """Read the allocator's own counters, which are always on."""
        self._module.synchronize()
        self._module.reset_peak_memory_stats()
        yield _CountedMemory(self._module)

    def reserved_bytes(self) -> int | None:
        """Return the bytes that the caching allocator reserves: it releases none unless memory runs out."""
        return int(self._module.memory_reserved())

    def total_memory_bytes(self) -> int:
        """Return the physical memory of the current device, in bytes."""
        return int(self._module.get_device_properties(self._module.current_device()).total_memory)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether ``error`` is an ``OutOfMemoryError``, or a ``RuntimeError`` with that message.

        Older releases of torch_npu, and hccl, raise a plain ``RuntimeError``.
        """
        if type(error).__name__ == "OutOfMemoryError":
            return True
        return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()

    def fingerprint(self) -> dict[str, str]:
        """Return the device's name and torch's release."""
        import torch

        return {
            "device": str(self._module.get_device_name(self._module.current_device())),
            "torch": str(torch.__version__),
        }


class CudaAdapter(Accelerator):
    """``torch.cuda`` with nccl."""

    name = "cuda"
    backend = "nccl"

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "cuda was requested, but torch sees no GPU. Check nvidia-smi and that torch is a CUDA build, or set "
                "MINDSPEED_AUTOPARALLEL_DEVICE=cpu."
            )
        super().__init__(torch.cuda)

    def fingerprint(self) -> dict[str, str]:
        """Add the CUDA release torch was built with."""
        import torch

        return {**super().fingerprint(), "cuda": str(torch.version.cuda)}


class NpuAdapter(Accelerator):
    """``torch.npu`` with hccl."""

    name = "npu"
    backend = "hccl"

    def __init__(self) -> None:
        try:
            import torch_npu
        except Exception as error:
            raise ConfigError(
                f"npu was requested, but torch_npu cannot be imported: {error}. Install the torch-npu release "
                "that fits torch, and source CANN's set_env.sh."
            ) from error
        if not torch_npu.npu.is_available():
            raise ConfigError(
                "npu was requested, but torch_npu sees no NPU. Check npu-smi info and ASCEND_RT_VISIBLE_DEVICES."
            )
        super().__init__(torch_npu.npu)

    def prepare(self) -> None:
        """Load torch_npu's own facade, which routes Megatron's torch.cuda calls to the NPU."""
        import torch_npu.contrib.transfer_to_npu  # noqa: F401

    def fingerprint(self) -> dict[str, str]:
        """Add the releases of torch_npu and CANN."""
        import torch_npu
        import torch_npu.npu.utils

        return {
            **super().fingerprint(),
            "torch_npu": str(torch_npu.__version__),
            "cann": str(torch_npu.npu.utils.get_cann_version()),
        }
