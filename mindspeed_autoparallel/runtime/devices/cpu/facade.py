"""The part of ``torch.cuda`` that Megatron uses, implemented on the CPU."""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Callable
from typing import Any

from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits


class Event:
    """An event as a timestamp of the host's clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self.time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: it is done."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Return milliseconds from this event to ``other``."""
        return (other.time - self.time) * 1e3


class Stream:
    """The only stream; all instances compare equal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = self.cuda_stream = self.device_index = 0

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: it is done."""
        return True

    def is_capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event recorded now."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the priorities that CUDA returns."""
        return (0, -1)


class StreamContext(contextlib.AbstractContextManager[Any]):
    """``with torch.cuda.stream(...)`` and ``with torch.cuda.device(...)``."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *exception: object) -> None:
        return None


CURRENT = Stream()


_RNG = ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "initial_seed")
_MEMORY_COUNTERS = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached"),
    *("max_memory_cached", "device_memory_used", "utilization", "temperature", "power_draw", "clock_rate"),
)
_NOTHING = (
    *("set_device", "synchronize", "empty_cache", "init", "_lazy_init", "ipc_collect", "set_stream", "check_error"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats", "_sleep"),
)
_TENSOR_TYPES = (
    *("FloatTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "ByteTensor"),
    *("DoubleTensor", "BoolTensor"),
)


def install(edits: Edits, total_memory_bytes: int) -> None:
    """Replace the functions of torch.cuda that Megatron calls, and make torch.accelerator report no accelerator."""
    import torch

    cuda = torch.cuda
    for name, function in _answers(total_memory_bytes).items():
        edits.set(cuda, name, function)
    edits.set(cuda, "Stream", Stream)
    edits.set(cuda, "ExternalStream", Stream)
    edits.set(cuda, "Event", Event)
    for name in ("stream", "StreamContext", "device"):
        edits.set(cuda, name, StreamContext)
    edits.set(cuda, "default_generators", (torch.default_generator,) * max(8, _local_world_size()))
    for name in _TENSOR_TYPES:
        edits.set(cuda, name, getattr(torch, name))
    # Other code also calls the functions through torch.cuda.random and torch.cuda.memory.
    for name in _RNG:
        edits.set(cuda.random, name, getattr(cuda, name))
    for name in (
        *("memory_allocated", "max_memory_allocated", "memory_stats", "empty_cache", "mem_get_info", "memory_reserved"),
        *("max_memory_reserved", "memory_snapshot", "reset_peak_memory_stats"),
    ):
        edits.set(cuda.memory, name, getattr(cuda, name))
    # --record-memory-history
    for name, value in (("_record_memory_history", None), ("_dump_snapshot", None), ("_snapshot", {"segments": []})):
        edits.set(cuda.memory, name, _answer(value))
    if hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):
        edits.set(torch._C, "_cuda_attach_out_of_memory_observer", _answer(None))
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        edits.set(cuda.nvtx, name, _answer(None))
    edits.set(cuda.nvtx, "range", lambda *args, **kwargs: contextlib.nullcontext())
    _accelerator(edits)


def _answers(total_memory_bytes: int) -> dict[str, Callable[..., Any]]:
    import torch

    properties = types.SimpleNamespace(
        name="CPU",
        major=8,
        minor=0,
        multi_processor_count=1,
        total_memory=total_memory_bytes,
        warp_size=32,
        gcnArchName="",
        L2_cache_size=0,
        regs_per_multiprocessor=0,
        max_threads_per_multi_processor=2048,
        is_integrated=0,
    )
    answers: dict[str, Callable[..., Any]] = {
        # initialize_megatron asserts a device, and a count of 0 would skip initialize_model_parallel.
        "is_available": _answer(True),
        "is_initialized": _answer(True),
        "device_count": _local_world_size,
        # An int, because callers write f"cuda:{current_device()}".
        "current_device": _answer(int(os.environ.get("LOCAL_RANK", "0"))),
        # The CPU generator stands in for the device generator.
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
        "initial_seed": lambda: torch.initial_seed(),
        "_lazy_call": lambda callback, **kwargs: callback(),
        "current_stream": _answer(CURRENT),
        "default_stream": _answer(CURRENT),
        "get_device_properties": _answer(properties),
        "get_device_name": _answer("CPU"),
        "get_device_capability": _answer((8, 0)),
        "memory_stats": lambda *args, **kwargs: _Zeros(),
        "memory_snapshot": lambda *args, **kwargs: [],
        "memory_summary": _answer(""),
        "mem_get_info": _answer((total_memory_bytes, total_memory_bytes)),
        "is_current_stream_capturing": _answer(False),
        "is_bf16_supported": _answer(True),
        "can_device_access_peer": _answer(True),
        "cudart": lambda: types.SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
    }
    answers |= {name: _answer(0) for name in _MEMORY_COUNTERS}
    answers |= {name: _answer(None) for name in _NOTHING}
    return answers


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _accelerator(edits: Edits) -> None:
    import torch

    # Optimizers, data loaders and checkpoints query torch.accelerator; a CUDA build would now return "cuda", and then
    # call a missing driver.
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return
    for name, value in (
        ("is_available", False),
        ("current_accelerator", None),
        ("device_count", 0),
        ("synchronize", None),
        ("set_stream", None),
        ("set_device_index", None),
        ("set_device_idx", None),
        ("current_stream", CURRENT),
        ("current_device_index", 0),
    ):
        if hasattr(accelerator, name):
            edits.set(accelerator, name, _answer(value))


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


class _Zeros(dict[str, int]):
    """Memory statistics: every counter is 0."""

    def __missing__(self, name: str) -> int:
        return 0
