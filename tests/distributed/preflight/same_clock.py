"""Imported by a training script in front of megatron: one clock for ranks that are played and ranks that are real.

The clock is the processor time of the main thread, without what passes inside a collective, in units of a small
computation that is timed at every reading: cores that others use as well run at changing speeds. One more microbatch is
counted by a clock without noise, which advances by what each operator computes and moves. What is measured is written to
``repeats.json``: every block of every repeat, its work, and the priced communication of a played rank.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mindspeed_autoparallel.runtime.devices.cpu.adapter import CpuAdapter
from mindspeed_autoparallel.runtime.devices.cpu.storages import tensors_in
from mindspeed_autoparallel.runtime.devices.selection import prepare_for_megatron
from mindspeed_autoparallel.runtime.profiling.balanced_routing import balance_routing
from mindspeed_autoparallel.runtime.profiling.measure import point
from mindspeed_autoparallel.runtime.profiling.operator_calls import is_free

COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "_all_gather_base",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "barrier",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
]
NUM_REPEATS = 21
REFERENCE_S = 1.1e-4  # about what it takes here, so that figures read as seconds


class Clock:
    """Processor time of the main thread outside of collectives, in units of the reference."""

    def __init__(self) -> None:
        self._value, self._since, self._last, self.depth = 0.0, 0.0, time.thread_time(), 0
        """``depth``: of collectives that are being called."""
        self._matrix, self._vector = torch.ones(192, 192), torch.ones(65536)
        self._speed = self._reference()

    def _reference(self) -> float:
        found = []
        for _ in range(3):
            begin = time.thread_time()
            self._matrix @ self._matrix
            torch.exp(self._vector)
            found.append(time.thread_time() - begin)
        return REFERENCE_S / sorted(found)[1]

    def count(self) -> None:
        """Count what has passed since the last call, unless inside a collective."""
        current = time.thread_time()
        if not self.depth:
            self._since += current - self._last
        self._last = current

    def now(self) -> float:
        """Return seconds; what has passed since the last call is scaled by the speed at both ends."""
        self.count()
        speed = self._reference()
        self._value += self._since * (self._speed + speed) / 2
        self._since, self._speed, self._last = 0.0, speed, time.thread_time()
        return self._value

    def paused(self, function: Any) -> Any:
        """Return ``function`` during which the clock stands still."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.count()
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.count()
                self.depth -= 1

        return run


class WorkClock(TorchDispatchMode):
    """A device on which operators outside of collectives take what their sizes say, always the same."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock, self._seconds = clock, 0.0

    def synchronize(self) -> None:
        """Return at once."""

    def clock(self) -> float:
        """Return seconds of work so far."""
        return self._seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(function), kwargs or {}
        result = function(*args, **kwargs)
        if name.startswith("aten.") and not is_free(name) and not self._clock.depth:
            moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((args, kwargs, result)))
            count = flop_registry.get(function._overloadpacket)
            flops = count(*args, **kwargs, out_val=result) if count is not None else 0
            self._seconds += 1e-6 + moved / 1e10 + flops / 5e10
        return result


def install(clock: Clock) -> None:
    """Use ``clock`` wherever a point is measured, and keep each repeat."""
    prepare_for_megatron()
    balance_routing()
    for name in COLLECTIVES:
        function = clock.paused(getattr(torch.distributed, name))
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            setattr(module, name, function)
    torch.distributed.Work.wait = clock.paused(torch.distributed.Work.wait)
    CpuAdapter.clock = lambda self: clock.now()
    point.time = types.SimpleNamespace(perf_counter=clock.now)
    costs_of, seen, sent, work = point.block_costs, [], [], []
    measured, microbatches = point.measure_point, []

    class Microbatch(point.Microbatch):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            microbatches[:] = [self]

    point.Microbatch = Microbatch

    def more_repeats(built: Any, forward_step: Any, arguments: Any, device: Any, task: Any) -> Any:
        return measured(built, forward_step, arguments, device, dataclasses.replace(task, num_repeats=NUM_REPEATS))

    point.measure_point = more_repeats

    def each_repeat(timed: Any, tracked: Any, seconds_between: Any) -> Any:
        seen.append([costs_of([run], tracked, seconds_between) for run in timed])
        with WorkClock(clock) as counted:
            counted_run = microbatches[0].run_on(counted)
        work.append(costs_of([counted_run], tracked, lambda start, end: end - start))
        return costs_of(timed, tracked, seconds_between)

    def with_communication(costs: Any, communication: Any, tracked: Any) -> Any:
        sent.append(costs_of([communication], tracked, lambda start, end: end - start))
        return communication.with_communication(costs, communication, tracked)

    point.block_costs, point.with_communication = each_repeat, with_communication

    def write() -> None:
        if seen and os.environ.get("RANK") == "0":
            Path("repeats.json").write_text(json.dumps({"seen": seen, "sent": sent, "work": work}))

    atexit.register(write)


install(Clock())
