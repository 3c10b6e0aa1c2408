"""Stand-ins for the host in a traced training: batches without data, and a device whose clock counts calls."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

from mindspeed_autoparallel.runtime.profiling.measure.relayout import HostCalls
from mindspeed_autoparallel.runtime.profiling.trace.fake_tensors import FakeTensorTracer


class FakeCalls(HostCalls):
    """The host's set-up calls, made without tensor data."""

    def __init__(self) -> None:
        super().__init__()
        self.tracer = FakeTensorTracer()
        self._iterators: dict[int, Any] = {}

    def record(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]
    ) -> Any:
        """Record the call and make it; tensors are fake from the first model on, batches become fake after loading."""
        if name == "build_data_iterators":
            function = functools.partial(self._real_data, function)
        if name == "setup_model_and_optimizer":
            # Keep imported objects out of the garbage collection between layouts: scanning them takes a quarter of
            # the time of a trace.
            gc.freeze()
            self.tracer.fake_mode.__enter__()
            self.tracer.__enter__()
        return super().record(name, function, args, kwargs)

    def _real_data(self, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        # Shapes of batches depend only on the micro batch size; building the data again takes longer than a trace.
        size = get_args().micro_batch_size
        if size not in self._iterators:
            with without_tracing():
                self._iterators[size] = [self._batches(iterator) for iterator in build(*args, **kwargs)]
        return self._iterators[size]

    def _batches(self, iterator: Any) -> Any:
        if isinstance(iterator, list):
            return [self._batches(item) for item in iterator]
        return None if iterator is None else _FakeBatches(iterator, self.tracer)


class _FakeBatches:
    """The host's batches as shapes."""

    def __init__(self, iterator: Any, tracer: FakeTensorTracer) -> None:
        self.iterator, self.tracer = iterator, tracer

    def __iter__(self) -> _FakeBatches:
        return self

    def __next__(self) -> Any:
        with without_tracing():
            batch = next(self.iterator)
        return self.tracer.as_fake(batch)


class FakeDevice:
    """The part of a device adapter that a microbatch uses; its clock is the place in the log."""

    def __init__(self, tracer: FakeTensorTracer) -> None:
        self.tracer = tracer

    def synchronize(self) -> None:
        return None

    def clock(self) -> int:
        return len(self.tracer.log.operators)

    @contextmanager
    def tracked_memory(self) -> Any:
        self.tracer.take_peak_bytes()
        yield self.tracer


@contextmanager
def without_tracing() -> Any:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def missing_state_bytes(optimizer: Any) -> int:
    """Return the bytes of state that the optimizer's first step will create, by a step of its class on a small
    real tensor."""
    import torch

    total = 0
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = getattr(part, "optimizer", part)
        if inner is None or inner.state:
            continue
        parameters = [item for group in inner.param_groups for item in group["params"]]
        if not parameters:
            continue
        with without_tracing():
            small = torch.zeros(64, dtype=parameters[0].dtype, requires_grad=True)
            small.grad = torch.zeros_like(small)
            known = type(inner).__init__.__code__.co_varnames
            twin = type(inner)([small], **{key: value for key, value in inner.defaults.items() if key in known})
            twin.step()
            tensors = [item for state in twin.state.values() for item in state.values() if torch.is_tensor(item)]
            ratio = sum(item.numel() * item.element_size() for item in tensors if item.numel() > 1) / small.numel()
        total += round(ratio * sum(item.numel() for item in parameters))
    return total
