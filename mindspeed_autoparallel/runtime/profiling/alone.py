"""Stand-ins for peers of a rank that runs alone with real tensors and torch's fake process groups.

A fake group returns at once. An all-gather repeats the rank's own part, and a reduction leaves it unchanged. A receive
would leave its buffer unchanged; here it fills the buffer with random numbers, because matrix products of zeros or NaN
run at another speed. Gathered objects are the rank's own; an object that another rank broadcasts is missing, and is
reported if the script then fails.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed_autoparallel.patching import call_after_import
from mindspeed_autoparallel.runtime.devices.cpu.edits import replaced
from mindspeed_autoparallel.runtime.megatron.exchanged_shapes import stand_in_for_neighbours
from mindspeed_autoparallel.runtime.megatron.features import ALONE_VARIABLE
from mindspeed_autoparallel.runtime.profiling.stalls import watch_for_stalls
from mindspeed_autoparallel.runtime.profiling.trace.fake_tensors import silence_timers, use_fake_process_groups
from mindspeed_autoparallel.runtime.state import of_process

MISSING = "mindspeed_autoparallel: missing object: "
"""Prefix of the log line about an object that another rank would have broadcast."""


class _State:
    """Whether the stand-ins are installed."""

    def __init__(self) -> None:
        self.installed = False


def install() -> None:
    """Replace the communication functions of this process, once; call before process groups exist."""
    state = of_process(_State)
    if state.installed:
        return
    state.installed = True
    if os.environ.get(ALONE_VARIABLE):
        os.environ["WORLD_SIZE"] = os.environ[ALONE_VARIABLE]
        watch_for_stalls()
    use_fake_process_groups()
    _fill_what_is_received()
    _note_missing_objects()
    stand_in_for_neighbours()
    call_after_import("megatron.core.optimizer.optimizer", _never_skip_a_step)
    call_after_import("megatron.core.timers", lambda module: silence_timers())


def _fill_what_is_received() -> None:
    import torch
    import torch.distributed as distributed
    from torch.distributed import distributed_c10d

    receive, receive_later, batched = distributed.recv, distributed.irecv, distributed.batch_isend_irecv
    exchanged = distributed.all_to_all_single

    def fill(tensor: Any) -> None:
        if tensor.is_floating_point():
            with torch.no_grad():  # Megatron's buffers take gradients
                tensor.normal_()

    def receiving(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            fill(tensor)
            return function(tensor, *args, **kwargs)

        return run

    recv, irecv = receiving(receive), receiving(receive_later)

    @functools.wraps(batched)
    def batch_isend_irecv(operations: list[Any]) -> Any:
        for operation in operations:
            if operation.op in (irecv, receive_later):
                fill(operation.tensor)
                operation.op = receive_later  # torch compares it with its own function
        return batched(operations)

    @functools.wraps(exchanged)
    def all_to_all_single(output: Any, input: Any, *sizes: Any, async_op: bool = False, **more: Any) -> Any:
        if input.numel() or not output.numel():
            return exchanged(output, input, *sizes, async_op=async_op, **more)
        fill(output)  # a fake group copies the rank's input, which is empty here
        return _Done() if async_op else None

    for module in (distributed, distributed_c10d):
        for function in (recv, irecv, batch_isend_irecv, all_to_all_single):
            setattr(module, function.__name__, function)
    _rebind({receive: recv, receive_later: irecv, batched: batch_isend_irecv, exchanged: all_to_all_single})


class _Done:
    """Finished work."""

    def wait(self, *unused: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _rebind(replaced: dict[Any, Any]) -> None:
    """Replace functions of torch in modules of Megatron that imported them by name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("megatron", "mindspeed", "mindspeed_mm", "mindspeed_llm"):
            for key, value in list(vars(module).items()):
                if callable(value) and getattr(value, "__hash__", None) and value in replaced:
                    setattr(module, key, replaced[value])


def _note_missing_objects() -> None:
    import torch.distributed as distributed
    from torch.distributed import distributed_c10d

    def broadcast_object_list(objects: list[Any], src: int | None = None, *unused: Any, **more: Any) -> None:
        if src is None:
            src = more.get("group_src")
        if src != distributed.get_rank() and any(item is None for item in objects):
            caller = sys._getframe(1)
            print(
                f"{MISSING}{caller.f_code.co_filename}:{caller.f_lineno} waits for an object that rank {src} "
                "broadcasts, and this rank runs alone",
                file=sys.stderr,
                flush=True,
            )

    def monitored_barrier(*unused: Any, **unused_too: Any) -> None:
        return None

    for module in (distributed, distributed_c10d):
        module.broadcast_object_list = broadcast_object_list
        module.monitored_barrier = monitored_barrier


def _never_skip_a_step(module: Any) -> None:
    """Let every step update: random gradients overflow, and a step that the loss scaler skips creates no state."""

    def no_overflow(self: Any) -> bool:
        return False

    for value in vars(module).values():
        if isinstance(value, type) and "_unscale_main_grads_and_check_for_nan" in vars(value):
            value._unscale_main_grads_and_check_for_nan = no_overflow  # type: ignore[attr-defined]


@contextmanager
def as_first_rank() -> Iterator[None]:
    """Report global rank 0 inside the context: only that rank builds data sets, and the others wait for it."""
    import torch.distributed as distributed
    from torch.distributed import distributed_c10d

    get_rank = distributed.get_rank

    @functools.wraps(get_rank)
    def rank_zero(group: Any = None) -> int:
        return 0 if group is None else int(get_rank(group))

    with replaced(distributed, "get_rank", rank_zero), replaced(distributed_c10d, "get_rank", rank_zero):
        yield
