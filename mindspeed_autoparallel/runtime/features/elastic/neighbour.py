"""Every node's first process watches that of the next node, and exits when that stops responding: torchrun then
restarts.

torchrun's agents watch only their own processes. If a node is lost while the others connect or run a collective of NCCL
or HCCL, their processes stay alive until the communication times out, which takes minutes. Each node updates a file
in the folder of the checkpoints, which its neighbour reads.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mindspeed_autoparallel.runtime.features.elastic.request import World
from mindspeed_autoparallel.runtime.state import of_process

SILENCE_S = 30.0
"""Seconds without an update after which a neighbour counts as lost; shared storage may stall for a while."""
UNSEEN_S = 120.0
"""The same for a neighbour that has not been seen yet: it may still be importing."""
_BEAT_S = 1.0


class _Exit:
    """The last ``SystemExit`` of this process."""

    def __init__(self) -> None:
        self.status: int | str | None = None
        self.is_recorded = False


class Neighbour:
    """The two files of a node: its own, which it touches, and the next node's, which it watches."""

    def __init__(self, folder: Path, world: World, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._folder = folder / f"nodes-{world.start}"
        self._folder.mkdir(parents=True, exist_ok=True)
        number = world.rank // world.per_node
        self.next_node = (number + 1) % world.num_nodes
        self._own, self._next = self._folder / str(number), self._folder / str(self.next_node)
        self._seen: int | None = None
        self._changed = clock()

    def beat(self) -> None:
        """Show that this node is alive."""
        self._own.write_text(str(time.time_ns()))

    def leave(self) -> None:
        """Show that this node ended without an error, so that no other waits for it."""
        self._own.with_suffix(".left").touch()

    def is_lost(self) -> bool:
        """Return whether the next node's file is unchanged for too long by this node's clock (nodes' clocks differ)."""
        if self._next.with_suffix(".left").exists():
            return False
        beat = self._next.stat().st_mtime_ns if self._next.exists() else None
        if beat != self._seen:
            self._seen, self._changed = beat, self._clock()
        limit_s = UNSEEN_S if self._seen is None else SILENCE_S
        return self._clock() - self._changed > limit_s


def watch_next_node(folder: Path, world: World) -> None:
    """Watch in a thread of each node's first process; if the neighbour is lost, end the process with code 1."""
    if world.num_nodes == 1 or world.rank % world.per_node:
        return
    record_exits()
    neighbour, over = Neighbour(folder, world), threading.Event()
    neighbour.beat()

    def run() -> None:
        while not over.wait(_BEAT_S):
            with contextlib.suppress(OSError):  # storage that stalls does not count as a lost node
                neighbour.beat()
                if neighbour.is_lost():
                    line = f"elastic: node {neighbour.next_node} is silent; this process ends so that torchrun restarts"
                    print(line, file=sys.stderr, flush=True)
                    os._exit(1)

    def end() -> None:
        over.set()
        if not ended_by_error():  # else the other nodes restart, too
            with contextlib.suppress(OSError):
                neighbour.leave()

    atexit.register(end)
    threading.Thread(target=run, daemon=True, name="next node").start()


def record_exits() -> None:
    """Record the status of every ``SystemExit`` for ``ended_by_error``: the interpreter keeps nothing of it.

    ``SystemExit`` becomes a subclass that records its status, and ``sys.exit`` raises that one, so that both are caught
    as before. A ``sys.exit`` that another module imported by name before raises the original, which such an ``except``
    no longer catches.
    """
    last = of_process(_Exit)
    if last.is_recorded:
        return
    last.is_recorded = True

    class RecordedExit(SystemExit):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            last.status = self.code

    @functools.wraps(sys.exit)
    def exit_recorded(status: int | str | None = None, /) -> NoReturn:
        raise RecordedExit(status)

    shown = threading.excepthook

    def threads_excepthook(error: threading.ExceptHookArgs, /) -> None:
        # The original prints every exception but exactly SystemExit.
        if error.exc_type is not RecordedExit:
            shown(error)

    threading.excepthook = threads_excepthook
    sys.exit, builtins.SystemExit = exit_recorded, RecordedExit  # type: ignore[misc]  # a class in place of a class


def ended_by_error() -> bool:
    """Return at exit whether an exception or an exit with an error code ended the script.

    The interpreter sets ``sys.last_value`` for the former. A ``SystemExit`` that the script catches counts unless
    another one follows.
    """
    return getattr(sys, "last_value", None) is not None or of_process(_Exit).status not in (None, 0)
