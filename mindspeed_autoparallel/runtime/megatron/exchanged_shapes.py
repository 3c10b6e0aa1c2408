"""Shapes that pipeline stages send each other ahead of their tensors, for a rank whose neighbours are absent.

With variable sequence lengths, Megatron's stages exchange the shape of every activation and gradient. A gradient has
the shape of its activation, and 1F1B returns gradients in the order in which activations were sent. A caller that runs
a schedule and can compute the shapes of the activations sets them with ``arriving``; otherwise they are those of the
longest sequence.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.patching import call_after_import
from mindspeed_autoparallel.runtime.megatron.features import ALONE_VARIABLE
from mindspeed_autoparallel.runtime.state import of_process

Shape = tuple[int, ...]


@dataclass
class _Schedule:
    """Shapes that one running schedule exchanges."""

    arriving: Iterator[Shape] | None = None
    sent: deque[Shape] = field(default_factory=deque)
    """Shapes of activations whose gradients are outstanding, the oldest first."""


class _Running:
    """Nested schedules, the innermost last; the first represents the training's own."""

    def __init__(self) -> None:
        self.schedules = [_Schedule()]


def plays_alone() -> bool:
    """Return whether this process runs a rank whose peers are absent."""
    return bool(os.environ.get(ALONE_VARIABLE))


@contextmanager
def arriving(shapes: Callable[[], Iterable[Shape] | None]) -> Iterator[None]:
    """Set the activation shapes of the schedule that runs inside the block.

    ``shapes`` returns them in the order of arrival, or ``None`` for the longest sequence. It is called only in a
    process that runs a rank alone.
    """
    if not plays_alone():
        yield
        return
    running = of_process(_Running).schedules
    found = shapes()
    running.append(_Schedule(None if found is None else iter(found)))
    try:
        yield
    finally:
        running.pop()


def sequence_shape(length: int, num_rows: int, config: Any) -> Shape:
    """Return the shape of a stage's activation for ``num_rows`` texts of ``length`` tokens; uses the current groups."""
    from megatron.core import parallel_state

    length //= parallel_state.get_context_parallel_world_size()
    if config.sequence_parallel:
        length //= parallel_state.get_tensor_model_parallel_world_size()
    return length, num_rows, int(config.hidden_size)


def stand_in_for_neighbours() -> None:
    """Replace Megatron's exchange of shapes by one without neighbours: a function in 0.12, later a method."""
    call_after_import("megatron.core.pipeline_parallel.p2p_communication", _replace)


def _replace(module: Any) -> None:
    def exchange(send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool, config: Any, *unused: Any) -> Any:
        return _exchanged(send_next, recv_prev, recv_next, config)

    def exchange_of(self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> Any:
        return _exchanged(send_next, recv_prev, recv_next, self.config)

    if hasattr(module, "P2PCommunicator"):
        module.P2PCommunicator._communicate_shapes = exchange_of
    else:
        module._communicate_shapes = exchange


def _exchanged(send_next: Any, recv_prev: bool, recv_next: bool, config: Any) -> tuple[list[int], list[int]]:
    """Return the shapes that the previous and next stages would send; ``[0, 0, 0]`` if nothing is received."""
    schedule = of_process(_Running).schedules[-1]
    if send_next is not None:
        schedule.sent.append(tuple(send_next.shape))
    activation, gradient = [0, 0, 0], [0, 0, 0]
    if recv_prev:
        activation = list(next(schedule.arriving) if schedule.arriving is not None else _longest(config))
    if recv_next:
        if not schedule.sent:
            raise ConfigError("a gradient is received before any activation was sent: its shape is unknown.")
        gradient = list(schedule.sent.popleft())
    return activation, gradient


def _longest(config: Any) -> Shape:
    from megatron.training import get_args

    arguments = get_args()
    return sequence_shape(int(arguments.seq_length), int(arguments.micro_batch_size), config)
