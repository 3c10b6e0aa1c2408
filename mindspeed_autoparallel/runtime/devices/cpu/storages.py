"""Live bytes of tensor storages on CPU, where no allocator counts them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class OutOfMemoryError(RuntimeError):
    """The emulated capacity of a CPU device is exceeded; named like torch's own."""


class TrackedStorages(TorchDispatchMode):
    """Counts every storage from its first operation until it is freed; storages live at entry count too."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        self._sizes: dict[int, int] = {}
        self._current = 0
        self._peak = 0

    def __enter__(self) -> TrackedStorages:
        import torch

        gc.collect()
        for thing in gc.get_objects():
            # isinstance on arbitrary proxies runs foreign code; type() does not.
            if issubclass(type(thing), torch.Tensor):
                self._add(thing)
        super().__enter__()
        return self

    def current_bytes(self) -> int:
        """Live now."""
        return self._current

    def take_peak_bytes(self) -> int:
        """Highest since the last call."""
        peak, self._peak = max(self._peak, self._current), self._current
        return peak

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch

        result = function(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, torch.Tensor):
                self._add(item)
        if self._limit_bytes is not None and self._current > self._limit_bytes:
            raise OutOfMemoryError(
                f"CPU out of memory: {self._current} bytes are live, the emulated device has {self._limit_bytes}."
            )
        return result

    def _add(self, tensor: Any) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # sparse and meta-like tensors have none
        key = storage._cdata
        if tensor.device.type != "cpu":
            return
        size = storage.nbytes()
        known = self._sizes.get(key)
        if known is not None:
            if known != size:
                # Megatron frees pipeline outputs by shrinking their storage in place.
                self._sizes[key] = size
                self._grow(size - known)
            return
        self._sizes[key] = size
        weakref.finalize(storage, self._remove, key)
        self._grow(size)

    def _grow(self, size: int) -> None:
        self._current += size
        self._peak = max(self._peak, self._current)

    def _remove(self, key: int) -> None:
        self._current -= self._sizes.pop(key, 0)
