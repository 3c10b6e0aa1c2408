"""Short pipelines of the host's own model, run by Megatron's own schedules: what passing between stages costs.

Every rank times its passes (a forward or backward of one microbatch on one chunk), the schedule around them, and the
whole step. What messages, and the host around them, add is found by ``tuning.traced.stages``.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.calibration_records import Stages
from mindspeed_autoparallel.runtime.profiling.measure.relayout import Built
from mindspeed_autoparallel.runtime.profiling.measure.steps import step_arguments

_NUM_WARMUP, _NUM_TIMED = 2, 7
_PARTS = ("forward", "backward", "schedule", "finalize", "optimizer", "step")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline to run: a layout's point, cut into equal stages."""

    at: MeasuredAt
    stages: Stages
    num_layers: int

    def result_file(self, folder: Path) -> Path:
        """Return where its times go."""
        size, chunks = self.stages.pipeline_size, self.stages.virtual_size
        return folder / f"pipeline_PP{size}_VPP{chunks}_{self.at.label().replace(' ', '_')}.json"


def time_pipeline(pipeline: Pipeline, built: Built, forward_step: Callable[..., Any], folder: Path) -> None:
    """Run ``built`` for a few steps; rank 0 writes what every rank found. Called on all ranks.

    Times of a rank in microseconds, medians over steps: ``forward_us`` and ``backward_us`` of every pass in the order
    it ran them, ``schedule_us`` without the end of the step, ``finalize_us``, ``optimizer_us``, ``step_us``.
    """
    import torch.distributed as distributed
    from megatron.core import parallel_state
    from megatron.training import get_args, training

    from mindspeed_autoparallel.runtime.devices import current_device

    arguments, device = get_args(), current_device()
    given = step_arguments(built, forward_step)
    steps = []
    for _ in range(_NUM_WARMUP + _NUM_TIMED):
        watch = _Watch(device)
        with watch.around(given):
            distributed.barrier()
            device.synchronize()
            watch.timed("step", training.train_step)(**watch.watched(given))
            device.synchronize()
        steps.append(watch.times_us())
    own = _medians(steps[_NUM_WARMUP:])
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
    """Return the median of every position in the step; what there is once is a number."""
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
        """Return times after the step, in the order things ran."""
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
        """Return arguments of ``train_step`` with the schedule timed, where this release takes the schedule as one."""
        if "forward_backward_func" not in given:
            return given
        return {**given, "forward_backward_func": self.timed("schedule", given["forward_backward_func"])}

    @contextlib.contextmanager
    def around(self, given: dict[str, Any]) -> Iterator[None]:
        """Watch passes, the end of the schedule and the optimizer inside the block."""
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
                stack.enter_context(_replaced(owner, attribute, self.timed(name, function)))
            if "forward_backward_func" not in given:
                # Up to 0.12 train_step chooses the schedule itself.
                stack.enter_context(_replaced(training, "get_forward_backward_func", choose_timed))
            yield


@contextlib.contextmanager
def _replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    own, before = attribute in vars(owner), getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)
