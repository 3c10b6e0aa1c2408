"""The steps of a child process: one to warm up, one to track memory, the others to measure time; then it exits.

On accelerators, memory is tracked in the warm-up step, too.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import first_line
from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.profiles.preflight_result import PassTime, RankRun
from mindspeed_autoparallel.profiles.records import json_of
from mindspeed_autoparallel.runtime.devices.adapter import MemoryProbe
from mindspeed_autoparallel.runtime.devices.cpu.edits import replaced
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.features.apply_plan.check import without_host_batches
from mindspeed_autoparallel.runtime.features.preflight.memory import LayerMarks, PeakPlaces
from mindspeed_autoparallel.runtime.features.preflight.ranks import PreflightTask
from mindspeed_autoparallel.runtime.launch.processes import OUT_OF_MEMORY_EXIT_CODE
from mindspeed_autoparallel.runtime.profiling.alone import as_first_rank
from mindspeed_autoparallel.runtime.profiling.measure.recorder import first_tensor
from mindspeed_autoparallel.runtime.profiling.stalls import begin_steps
from mindspeed_autoparallel.runtime.state import of_process

_NAMES = {"F": "forward", "B": "backward"}
_MEMORY_STEP = 1


class PreflightWatch:
    """Measurements of the rank that this process plays; without a task nothing is recorded."""

    def __init__(self) -> None:
        self.task: PreflightTask | None = None
        self.places = PeakPlaces()
        self.marks = LayerMarks(self.places)
        self.num_done = 0
        self.resident_bytes = 0
        self.reserved_bytes: int | None = None
        self.step_us: list[float] = []
        self.optimizer_us: list[float] = []
        self.passes: list[tuple[str, int, int, Any, Any]] = []
        """Passes of the current step: kind, chunk, microbatch, and the device's clock before and after."""
        self._chunks: list[Any] = []
        self._forwards: dict[int, tuple[int, int]] = {}
        """Chunk and microbatch by the identity of a forward's output."""
        self._counts: dict[int, int] = {}

    def begin_step(self, model: Any) -> None:
        """Drop the passes of the previous step."""
        begin_steps()
        self._chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        self.passes.clear()
        self._forwards.clear()
        self._counts.clear()

    @property
    def tracks_memory(self) -> bool:
        """Return whether memory is tracked in the current step."""
        return self.num_done == _MEMORY_STEP or (self.num_done == 0 and current_device().name != "cpu")

    @property
    def is_timed(self) -> bool:
        """Return whether the current step is timed."""
        return self.num_done > _MEMORY_STEP

    def follow(self, memory: MemoryProbe) -> None:
        """Record the peaks of the current step by place, in the regions that ``memory`` tracks."""
        memory.take_peak_bytes()
        self.places.probe, self.resident_bytes = memory, memory.current_bytes()
        self.marks.attach(self._chunks)

    def end_step(self) -> None:
        """Count the step; end the process after the task's last one."""
        assert self.task is not None
        self.num_done += 1
        self.reserved_bytes = current_device().reserved_bytes()
        if self.num_done == self.task.num_steps:
            self.leave("ok")

    def run_pass(self, kind: str, args: tuple[Any, ...], kwargs: Mapping[str, object], run: Callable[[], Any]) -> Any:
        """Run a forward or backward of the schedule, and record its place and time."""
        device = current_device()
        if kind == "F":
            chunk = self._chunk_of(kwargs.get("model", args[2] if len(args) > 2 else None))
            microbatch = self._counts.get(chunk, 0)
            self._counts[chunk] = microbatch + 1
        else:
            output = first_tensor(kwargs.get("output_tensor", args[1] if len(args) > 1 else None))
            chunk, microbatch = self._forwards.pop(id(output), (0, 0))
        name = f"{_NAMES[kind]} of microbatch {microbatch}" + (f", chunk {chunk}" if len(self._chunks) > 1 else "")
        self.marks.current_pass, self.marks.is_backward = name, kind == "B"
        self.places.enter(_NAMES[kind], name)
        begin = device.clock()
        result = run()
        self.passes.append((kind, chunk, microbatch, begin, device.clock()))
        self.places.enter("between passes", f"after the {name}")
        if kind == "F":
            output = first_tensor(result)
            if output is not None:
                self._forwards[id(output)] = (chunk, microbatch)
        return result

    def _chunk_of(self, model: Any) -> int:
        return next((index for index, chunk in enumerate(self._chunks) if chunk is model), 0)

    def result(self, status: str, reason: str = "") -> RankRun:
        """Return the measurements so far."""
        assert self.task is not None
        between = current_device().seconds_between
        passes = (
            ()
            if status != "ok"
            else tuple(
                PassTime(kind=kind, chunk=chunk, microbatch=microbatch, us=between(begin, end) * 1e6)
                for kind, chunk, microbatch, begin, end in self.passes
            )
        )
        return RankRun(
            rank=self.task.rank,
            status=status,
            num_steps=self.num_done,
            peak_bytes=self.places.peak_bytes,
            reserved_bytes=self.reserved_bytes,
            peak_place=self.places.peak_place or self.places.place,
            resident_bytes=self.resident_bytes,
            places=dict(self.places.by_kind),
            layer_bytes=self.places.layer_bytes,
            passes=passes,
            optimizer_us=statistics.median(self.optimizer_us) if self.optimizer_us else 0.0,
            step_us=statistics.median(self.step_us) if self.step_us else 0.0,
            reason=reason,
        )

    def leave(self, status: str, reason: str = "", code: int = 0) -> None:
        """Write the result and end the process at once: code after the training loop would wait for absent ranks."""
        assert self.task is not None
        write_json_atomic(Path(self.task.result), json_of(self.result(status, reason)))
        print(f"pre-flight of rank {self.task.rank}: {status} after {self.num_done} steps", flush=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def watching() -> PreflightWatch:
    """Return the measurements of this process."""
    return of_process(PreflightWatch)


def schedule_pass(kind: str, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap ``forward_step`` (``F``) and ``backward_step`` (``B``) of Megatron's schedules."""
    watch = watching()
    if watch.task is None:
        return wrapped(*args, **kwargs)
    return watch.run_pass(kind, args, kwargs, lambda: wrapped(*args, **kwargs))


def build_data(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap the host's building of data iterators."""
    if watching().task is None:
        return wrapped(*args, **kwargs)
    with as_first_rank():
        return wrapped(*args, **kwargs)


def log_nothing(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap the host's ``training_log``: the losses of a rank alone are meaningless."""
    return wrapped(*args, **kwargs) if watching().task is None else False


def train_step(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Wrap the host's ``train_step``; ends the process after the task's last step, or out of memory."""
    watch = watching()
    if watch.task is None:
        return wrapped(*args, **kwargs)
    device = current_device()
    # Positions in train_step's signature: forward step function, data iterator, model, optimizer, ...
    data_iterator = kwargs.get("data_iterator", args[1] if len(args) > 1 else None)
    model = kwargs.get("model", args[2] if len(args) > 2 else None)
    optimizer = kwargs.get("optimizer", args[3] if len(args) > 3 else None)
    watch.begin_step(model)
    try:
        with _marked_optimizer(watch, optimizer):
            if watch.tracks_memory:
                result = _followed(watch, device, data_iterator, lambda: wrapped(*args, **kwargs))
            else:
                device.synchronize()
                begin = device.clock()
                result = wrapped(*args, **kwargs)
                end = device.clock()
                device.synchronize()
                if watch.is_timed:
                    watch.step_us.append(device.seconds_between(begin, end) * 1e6)
    except BaseException as error:
        if not device.is_out_of_memory(error):
            raise
        watch.leave("out_of_memory", first_line(error), OUT_OF_MEMORY_EXIT_CODE)
    watch.end_step()
    return result


def _followed(watch: PreflightWatch, device: Any, data_iterator: Any, run: Callable[[], Any]) -> Any:
    with without_host_batches(device, data_iterator), device.tracked_memory() as memory:
        watch.follow(memory)
        try:
            watch.places.enter("between passes", "start of the step")
            result = run()
            device.synchronize()
            watch.places.close()
        finally:
            watch.marks.detach()
            watch.places.probe = None
    return result


@contextlib.contextmanager
def _marked_optimizer(watch: PreflightWatch, optimizer: Any) -> Iterator[None]:
    """Record the place and the time of ``optimizer.step`` inside the block."""
    if optimizer is None:
        yield
        return
    device, step = current_device(), optimizer.step

    def timed(*args: Any, **kwargs: Any) -> Any:
        watch.places.enter("optimizer step", "optimizer step")
        begin = device.clock()
        result = step(*args, **kwargs)
        end = device.clock()
        if watch.places.probe is None and watch.is_timed:
            watch.optimizer_us.append(device.seconds_between(begin, end) * 1e6)
        watch.places.enter("between passes", "after the optimizer step")
        return result

    with replaced(optimizer, "step", timed):
        yield
