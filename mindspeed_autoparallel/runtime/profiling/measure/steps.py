"""Whole steps of the host: of one microbatch, of several, and of short pipelines by Megatron's own schedules.

The time of a step beyond blocks and optimizer is host overhead; ``planner.tuner.stages`` finds the overhead of
messages and stages. In a pipeline every rank times its passes (a forward or backward of one microbatch on one
chunk), the schedule around them, and the whole step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.calibration_records import Stages
from mindspeed_autoparallel.profiles.records import StepsRecord
from mindspeed_autoparallel.runtime.devices.cpu.edits import replaced
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.profiling.measure.relayout import Built, set_num_microbatches

_NUM_WARMUP, _NUM_TIMED = 1, 5
NUM_MICROBATCHES = 4

_NUM_WARMUP_STEPS, _NUM_TIMED_STEPS = 2, 7
_PARTS = ("forward", "backward", "schedule", "finalize", "optimizer", "step")


def whole_steps(built: Any, forward_step: Callable[..., Any], arguments: Any, device: Any) -> StepsRecord:
    """Return the median times of the host's own ``train_step``, with one microbatch and with several.

    Nothing is timed if this release's ``train_step`` has unknown required parameters.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.training import training

    given = step_arguments(built, forward_step)
    if not given:
        return StepsRecord()
    times: dict[str, float] = {}
    with replaced(given["config"], "finalize_model_grads_func", finalize_model_grads):
        try:
            for name, number in (("one_us", 1), ("many_us", NUM_MICROBATCHES)):
                _set_num_microbatches(arguments, number)
                times[name] = _median_us(lambda: training.train_step(**given), device)
        finally:
            _set_num_microbatches(arguments, 1)
    return StepsRecord(**times, num_microbatches=NUM_MICROBATCHES)


def step_arguments(built: Any, forward_step: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of the host's ``train_step``; empty if this release's has unknown required parameters."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config
    from megatron.training import get_args, training

    arguments = get_args()
    if not hasattr(arguments, "curr_iteration"):
        arguments.curr_iteration = 0  # Megatron 0.12: train sets it, train_step reads it
    chunks = built.model if isinstance(built.model, list) else [built.model]
    known = {
        "forward_step_func": forward_step,
        "data_iterator": built.data_iterator,
        "model": chunks,
        "optimizer": built.optimizer,
        "opt_param_scheduler": _Still(),
        "config": get_model_config(chunks[0]),
        "forward_backward_func": get_forward_backward_func(),
        "iteration": 0,
    }
    parameters = inspect.signature(training.train_step).parameters
    if any(item.default is item.empty and name not in known for name, item in parameters.items()):
        return {}
    return {name: value for name, value in known.items() if name in parameters}


def _median_us(run: Callable[[], Any], device: Any) -> float:
    times = []
    for _ in range(_NUM_WARMUP + _NUM_TIMED):
        device.synchronize()
        begin = time.perf_counter()
        run()
        device.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[_NUM_WARMUP:])


def _set_num_microbatches(arguments: Any, number: int) -> None:
    arguments.global_batch_size = number * arguments.micro_batch_size * arguments.data_parallel_size
    set_num_microbatches(arguments)


class _Still:
    """A learning rate scheduler that changes nothing."""

    def step(self, increment: int) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline to run: a layout's point, cut into equal stages."""

    at: MeasuredAt
    stages: Stages
    num_layers: int

    def result_file(self, folder: Path) -> Path:
        """Return the file of its times."""
        size, chunks = self.stages.pipeline_size, self.stages.virtual_size
        return folder / f"pipeline_PP{size}_VPP{chunks}_{self.at.label().replace(' ', '_')}.json"


def time_pipeline(pipeline: Pipeline, built: Built, forward_step: Callable[..., Any], folder: Path) -> None:
    """Run ``built`` for a few steps; rank 0 writes the times of all ranks. Call it on all ranks.

    Times of a rank in microseconds, medians over steps: ``forward_us`` and ``backward_us`` of every pass in the order
    it ran them, ``schedule_us`` without ``finalize_us``, ``finalize_us``, ``optimizer_us``, ``step_us``.
    """
    import torch.distributed as distributed
    from megatron.core import parallel_state
    from megatron.training import get_args, training

    arguments, device = get_args(), current_device()
    given = step_arguments(built, forward_step)
    steps = []
    for _ in range(_NUM_WARMUP_STEPS + _NUM_TIMED_STEPS):
        watch = _Watch(device)
        with watch.around(given):
            distributed.barrier()
            device.synchronize()
            watch.timed("step", training.train_step)(**watch.watched(given))
            device.synchronize()
        steps.append(watch.times_us())
    own = _medians(steps[_NUM_WARMUP_STEPS:])
    chunks = given["model"]
    own["updated_bytes"] = sum(
        parameter.numel() * parameter.element_size()
        for chunk in chunks
        for parameter in chunk.parameters()
        if parameter.requires_grad
    ) // (arguments.data_parallel_size if arguments.use_distributed_optimizer else 1)
    own["stage"] = parallel_state.get_pipeline_model_parallel_rank()
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    if distributed.get_rank() == 0:
        write_json_atomic(
            pipeline.result_file(folder),
            {
                "schema_version": 1,
                "status": "ok",
                **asdict(pipeline),
                "data_size": arguments.data_parallel_size,
                "ranks": ranks,
            },
        )


def _medians(steps: list[dict[str, list[float]]]) -> dict[str, object]:
    """Return the median of every position in the step; a part that occurs once becomes a number."""
    found = {
        f"{name}_us": [statistics.median(values) for values in zip(*(step[name] for step in steps), strict=True)]
        for name in _PARTS
    }
    once = {name: sum(found[name]) for name in ("schedule_us", "finalize_us", "optimizer_us", "step_us")}
    return {**found, **once, "schedule_us": once["schedule_us"] - once["finalize_us"]}


class _Watch:
    """Clock readings around the parts of one step."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._readings: dict[str, list[tuple[Any, Any]]] = {name: [] for name in _PARTS}

    def times_us(self) -> dict[str, list[float]]:
        """Return the times of every part in execution order; call it after the step."""
        return {
            name: [self._device.seconds_between(*pair) * 1e6 for pair in pairs]
            for name, pairs in self._readings.items()
        }

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with clock readings before and after."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = self._device.clock()
            try:
                return function(*args, **kwargs)
            finally:
                self._readings[name].append((begin, self._device.clock()))

        return run

    def watched(self, given: dict[str, Any]) -> dict[str, object]:
        """Return arguments of ``train_step``, with a timed schedule if this release takes it as an argument."""
        if "forward_backward_func" not in given:
            return given
        return {**given, "forward_backward_func": self.timed("schedule", given["forward_backward_func"])}

    @contextlib.contextmanager
    def around(self, given: dict[str, Any]) -> Iterator[None]:
        """Time passes, the end of the schedule and the optimizer within the context."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import schedules
        from megatron.training import training

        def choose_timed() -> Callable[..., Any]:
            return self.timed("schedule", schedules.get_forward_backward_func())

        config, optimizer = given["config"], given["optimizer"]
        with contextlib.ExitStack() as stack:
            for name, owner, attribute, function in (
                ("forward", schedules, "forward_step", schedules.forward_step),
                ("backward", schedules, "backward_step", schedules.backward_step),
                ("finalize", config, "finalize_model_grads_func", finalize_model_grads),
                ("optimizer", optimizer, "step", optimizer.step),
            ):
                stack.enter_context(replaced(owner, attribute, self.timed(name, function)))
            if "forward_backward_func" not in given:
                # Up to 0.12 train_step chooses the schedule itself.
                stack.enter_context(replaced(training, "get_forward_backward_func", choose_timed))
            yield
