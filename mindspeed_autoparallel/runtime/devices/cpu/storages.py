"""Live bytes of tensor storages on CPU, where no allocator counts them."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits

_LET_GO_S = 0.005


class OutOfMemoryError(RuntimeError):
    """The emulated capacity of a CPU device is exceeded; named like torch's own."""


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors in nested tuples, lists and dictionaries."""
    import torch

    # torch's own tree iteration also handles other containers, but takes as long as an operator on fake tensors.
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _with_subclasses(kind: type) -> set[type]:
    """Return ``kind`` and every class derived from it."""
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


@functools.cache
def _name(function: Any) -> str:
    return str(function)


class TrackedStorages(TorchDispatchMode):
    """Counts every storage from its first operation until it is freed; by default storages that are live at entry count
    too.

    Parameters, gradients, optimizer state, saved activations and communication buffers are all storages, and views
    share one. Not counted: a kernel's own workspace, what other threads allocate, and the copy of its input that gloo
    reduces for a reduce-scatter, which no accelerator's library makes.
    """

    def __init__(
        self, limit_bytes: int | None = None, let_go_s: float = _LET_GO_S, count_existing: bool = True
    ) -> None:
        """Raise ``OutOfMemoryError`` above ``limit_bytes``; wait ``let_go_s`` seconds after a collective.

        gloo's threads hold a tensor longer than its wait; an accelerator's allocator does not. Without
        ``count_existing`` a storage that is an argument before it is a result does not count.
        """
        super().__init__()
        self._limit_bytes = limit_bytes
        self._let_go_s = let_go_s
        self._count_existing = count_existing
        self._existing: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._current = 0
        self._peak = 0
        self._edits = Edits()
        self._after_collective = False
        self._is_waiting = False

    def __enter__(self) -> TrackedStorages:
        import torch

        if self._count_existing:
            self._add_all()
        resize = torch.UntypedStorage.resize_

        @functools.wraps(resize)
        def resize_and_count(storage: Any, size: int) -> Any:
            # Recompute frees outputs like this, without any operation.
            result = resize(storage, size)
            self._add_storage(storage)
            return result

        self._edits.set(torch.UntypedStorage, "resize_", resize_and_count)
        if torch.distributed.is_available():
            self._edits.set(torch.distributed.Work, "wait", self._uncounted(torch.distributed.Work.wait))
        super().__enter__()
        return self

    def _uncounted(self, wait: Any) -> Any:
        """Return a ``Work.wait`` that suspends counting: in it gloo copies a reduce-scatter's result out of its own
        copy."""

        @functools.wraps(wait)
        def run(work: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_waiting = True
            try:
                return wait(work, *args, **kwargs)
            finally:
                self._is_waiting = False

        return run

    def _add_all(self) -> None:
        import torch

        gc.collect()
        kinds = _with_subclasses(torch.Tensor)
        # isinstance on arbitrary proxies runs foreign code; type() does not.
        for thing in [thing for thing in gc.get_objects() if type(thing) in kinds]:
            self._add(thing)
            with contextlib.suppress(RuntimeError):  # a tensor that C++ has released has no autograd state
                if thing.is_leaf and thing.grad is not None:
                    self._add(thing.grad)  # may have no Python object until it is read

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._edits.undo()

    def _let_go(self) -> None:
        if self._after_collective:
            time.sleep(self._let_go_s)
            self._after_collective = False

    def current_bytes(self) -> int:
        """Return the bytes that are live now."""
        self._let_go()
        return self._current

    def take_peak_bytes(self) -> int:
        """Return the highest number of live bytes since the last call."""
        peak, self._peak = max(self._peak, self._current), self._current
        return peak

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and the check for compilation takes as long as an operator on fake tensors.
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch

        if function is torch.ops.prim.device.default:
            return function(*args)  # a query of the device, not an operator, and more frequent
        self._let_go()
        name, kwargs = _name(function), kwargs or {}
        if self._is_waiting:
            return function(*args, **kwargs)
        if not self._count_existing and name != "aten.lift_fresh.default":  # its argument was created just now
            for tensor in tensors_in((args, kwargs)):
                self._pass_over(tensor.untyped_storage())
        result = self._run(function, name, args, kwargs)
        self._after_collective = self._let_go_s > 0 and name.startswith(("c10d.", "_c10d_functional."))
        # Arguments too: tensors from numpy, a file or another process are no operation's result.
        for tensor in tensors_in((result, args, kwargs)):
            self._add(tensor)
        if self._limit_bytes is not None and self._current > self._limit_bytes:
            raise OutOfMemoryError(
                f"CPU out of memory: {self._current} bytes are live, the emulated device has {self._limit_bytes}."
            )
        return result

    def _run(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def _add(self, tensor: Any) -> None:
        # A DTensor reports a storage of its global size, but only its local tensor has memory.
        tensor = getattr(tensor, "_local_tensor", tensor)
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # sparse tensors and wrappers around others have none
        self._add_storage(storage)

    def _add_storage(self, storage: Any) -> None:
        if storage.device.type == "cpu":  # others are meta and fake tensors
            self._count(storage)

    def _pass_over(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes and key not in self._existing:
            self._existing.add(key)
            weakref.finalize(storage, self._existing.discard, key).atexit = False

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._existing:
            return
        known = self._sizes.get(key)
        if known is None:
            # Bound to the storage's Python object, which torch keeps for as long as C++ holds the storage.
            weakref.finalize(storage, self._remove, key).atexit = False
        self._sizes[key] = size
        self._current += size - (known or 0)
        self._peak = max(self._peak, self._current)

    def _remove(self, key: int) -> None:
        self._current -= self._sizes.pop(key, 0)
