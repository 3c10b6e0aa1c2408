"""Whole steps of the host, of one microbatch and of several: what blocks and optimizer do not explain is its own."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

from mindspeed_autoparallel.profiles.records import StepsRecord
from mindspeed_autoparallel.runtime.profiling.measure.relayout import set_num_microbatches

_NUM_WARMUP, _NUM_TIMED = 1, 5
NUM_MICROBATCHES = 4


def whole_steps(built: Any, forward_step: Callable[..., Any], arguments: Any, device: Any) -> StepsRecord:
    """Time the host's own ``train_step`` with one microbatch and with several; medians.

    Nothing is timed where this release's ``train_step`` has unknown parameters.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.training import training

    given = step_arguments(built, forward_step)
    if not given:
        return StepsRecord()
    config = given["config"]
    before, config.finalize_model_grads_func = config.finalize_model_grads_func, finalize_model_grads
    try:
        times: dict[str, float] = {}
        for name, number in (("one_us", 1), ("many_us", NUM_MICROBATCHES)):
            _set_num_microbatches(arguments, number)
            times[name] = _median_us(lambda: training.train_step(**given), device)
    finally:
        config.finalize_model_grads_func = before
        _set_num_microbatches(arguments, 1)
    return StepsRecord(**times, num_microbatches=NUM_MICROBATCHES)


def step_arguments(built: Any, forward_step: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of the host's ``train_step``; empty where this release's has unknown parameters."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config
    from megatron.training import get_args, training

    arguments = get_args()
    if not hasattr(arguments, "curr_iteration"):
        arguments.curr_iteration = 0  # 0.12: its train sets it and train_step reads it
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
    """A learning rate that stays."""

    def step(self, increment: int) -> None:
        """Do nothing."""
