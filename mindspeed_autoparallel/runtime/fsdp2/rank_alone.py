"""The child process of a pre-flight in the native trainer: it runs one rank for a few measured steps."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import first_line
from mindspeed_autoparallel.hosts.yaml_edit import Value
from mindspeed_autoparallel.profiles.records import record_of
from mindspeed_autoparallel.runtime.devices.cpu.adapter import MEMORY_VARIABLE
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.features.preflight.ranks import PreflightTask
from mindspeed_autoparallel.runtime.features.preflight.watch import PreflightWatch, watching
from mindspeed_autoparallel.runtime.fsdp2.apply import read_plan, set_plan
from mindspeed_autoparallel.runtime.fsdp2.trainer import NativeTrainer
from mindspeed_autoparallel.runtime.launch.processes import OUT_OF_MEMORY_EXIT_CODE
from mindspeed_autoparallel.runtime.profiling import alone
from mindspeed_autoparallel.runtime.profiling.balanced_routing import balance_routing

_OFF: dict[str, Value] = {
    "training.load": None,
    "training.load_rank0_and_broadcast": False,
    "training.save": None,
    "training.val_interval": 0,
    "training.log_interval": 1,
}
"""Settings that switch off loading, saving and evaluation, and log every step: the log line marks its end."""


def prepare_rank(native: NativeTrainer, data: dict[str, object]) -> None:
    """Run this process as the rank of ``data``'s task, and end it after the task's steps."""
    task = record_of(data["preflight"], "task of this process", PreflightTask)
    os.environ.pop(MEMORY_VARIABLE, None)  # the parent process compares the peak with the limit
    alone.install()
    balance_routing(task.imbalance)
    native.set_values({key: value for key, value in _OFF.items() if hasattr(native.arguments.training, key[9:])})
    native.set_values({"training.train_iters": task.num_steps + 1, "training.train_epochs": None})
    if task.plan:
        set_plan(native, read_plan(native, Path(task.plan)), Path(task.plan))
    watch = watching()
    watch.task = task
    _Steps(watch).attach(native.module.TrainEngine)


class _Steps:
    """Measures the steps of the trainer's engine, each from ``train_step`` to ``training_log``."""

    def __init__(self, watch: PreflightWatch) -> None:
        self._watch = watch
        self._device = current_device()
        self._tracked = contextlib.ExitStack()
        self._begin: Any = None
        self._updating: Any = None

    def attach(self, engine: Any) -> None:
        """Wrap the methods of the engine's class."""
        train_step, training_log, train = engine.train_step, engine.training_log, engine.train

        @functools.wraps(train_step)
        def watched(this: Any, *args: Any, **kwargs: Any) -> Any:
            self._start(this.model)
            result = train_step(this, *args, **kwargs)
            self._watch.places.enter("optimizer step", "optimizer step")
            self._updating = self._device.clock()
            return result

        @functools.wraps(training_log)
        def ended(*unused: Any, **unused_too: Any) -> None:
            self._end()

        @functools.wraps(train)
        def guarded(this: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return train(this, *args, **kwargs)
            except BaseException as error:
                if not self._device.is_out_of_memory(error):
                    raise
                self._watch.leave("out_of_memory", first_line(error), OUT_OF_MEMORY_EXIT_CODE)

        engine.train_step, engine.training_log, engine.train = watched, ended, guarded

    def _start(self, model: Any) -> None:
        watch = self._watch
        watch.begin_step(model)
        if watch.num_done == 0:
            self._mark_passes(model)
        if watch.tracks_memory:
            watch.follow(self._tracked.enter_context(self._device.tracked_memory()))
        self._device.synchronize()
        self._begin = self._device.clock()
        watch.places.enter("between passes", "start of the step")

    def _mark_passes(self, model: Any) -> None:
        """Record where a forward and a backward of the whole model begin."""
        watch = self._watch

        def before(*unused: Any) -> None:
            self._close_backward()
            watch.marks.is_backward = False
            self._enter("forward", "F")

        def after(*unused: Any) -> None:
            kind, chunk, number, begin, _ = watch.passes[-1]
            watch.passes[-1] = (kind, chunk, number, begin, self._device.clock())
            watch.marks.is_backward = True
            self._enter("backward", "B")

        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)

    def _enter(self, name: str, kind: str) -> None:
        watch, now = self._watch, self._device.clock()
        number = sum(one[0] == kind for one in watch.passes)
        watch.marks.current_pass = f"{name} of microbatch {number}"
        watch.places.enter(name, watch.marks.current_pass)
        watch.passes.append((kind, 0, number, now, now))

    def _close_backward(self, end: Any = None) -> None:
        passes = self._watch.passes
        if passes and passes[-1][0] == "B":
            passes[-1] = (*passes[-1][:4], end or self._device.clock())

    def _end(self) -> None:
        watch, device = self._watch, self._device
        end = device.clock()
        device.synchronize()
        self._close_backward(self._updating)
        watch.places.close()
        if watch.places.probe is None and watch.is_timed:
            watch.step_us.append(device.seconds_between(self._begin, end) * 1e6)
            watch.optimizer_us.append(device.seconds_between(self._updating, end) * 1e6)
        watch.places.probe = None
        watch.marks.detach()
        self._tracked.close()
        watch.end_step()
