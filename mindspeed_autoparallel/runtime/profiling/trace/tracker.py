"""Follows storages from their first appearance to their end, operators and collectives with their sizes."""

from __future__ import annotations

import functools
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_autoparallel.runtime.profiling.trace.tensor_shapes import run_on_shapes


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    # torch's own tree iteration knows every container there is, and takes as long as the pretended operators.
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


@functools.cache
def _name(function: Any) -> str:
    return str(function)


class Tracker(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Live and peak bytes of storages that operators create; what existed before is not counted.

    torch's own memory tracker fails on modules called more than once, which recompute does.
    ``pause_s`` is waited after every collective: gloo's threads let go of a tensor some time after its wait returned,
    and until then it counts as live.
    """

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        self._pause_s = pause_s
        self._paused = True
        self.live_bytes = 0
        self.peak_bytes = 0
        self.operators: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
        self.collectives: Counter[tuple[str, int]] = Counter()
        self._sizes: dict[int, int] = {}

    def ignore(self, tensors: Any) -> None:
        """Pass over storages that are not this run's own: parameters and inputs."""
        for tensor in _tensors(tensors):
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in self._sizes:
                self._sizes[key] = 0
                weakref.finalize(storage, self._end, key)

    def _end(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)

    def _appear(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._end, key)

    def pause(self) -> None:
        """Give the backend's threads time to let go of what the last collective used."""
        if not self._paused:
            time.sleep(self._pause_s)
            self._paused = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and being passed over costs as much as a pretended operator.
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:
            return function(*args)  # asked more often than there are operators
        self.pause()
        tensors = list(_tensors((args, kwargs)))
        name = _name(function)
        result = run_on_shapes(function, name, tensors, args, kwargs or {})
        if name.startswith(("c10d.", "_c10d_functional.")):
            self._paused = self._pause_s == 0.0
            size = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
            self.collectives[name, size] += 1
        elif not name.startswith("prim"):
            self.operators[name, tuple(tuple(tensor.shape) for tensor in tensors)] += 1
        for tensor in _tensors(result):
            self._appear(tensor)
        return result


class SavedBytes:
    """Bytes of distinct storages that autograd keeps for backward, parameters and inputs left out."""

    def __init__(self, ignored: Any) -> None:
        self._ignored = {tensor.untyped_storage()._cdata for tensor in _tensors(ignored)}
        self._seen: dict[int, Any] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        """Sum over what has been saved inside the context."""
        return sum(storage.nbytes() for storage in self._seen.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ignored:
            # Holding the storage keeps its address from being given out twice.
            self._seen.setdefault(storage._cdata, storage)
        return tensor

    def release(self) -> int:
        """Return the total; lets go of the storages, so that backward frees them as it would."""
        total = self.total
        self._seen.clear()
        return total

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
