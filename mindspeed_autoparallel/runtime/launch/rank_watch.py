"""Reports the rank of a training that died: ranks increment counters in the training's store; peers watch them.

torchrun reports which of its processes failed. A training that is started in another way (srun, mpirun, a loop in a
shell) only prints "connection closed by peer" on gloo, and nothing for ten minutes on NCCL and HCCL. This watch ends no
process: it reports the rank, and the training decides what to do.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mindspeed_autoparallel.errors import first_line
from mindspeed_autoparallel.runtime.launch.liveness import Heartbeat, Watch
from mindspeed_autoparallel.runtime.megatron.features import ALONE_VARIABLE
from mindspeed_autoparallel.runtime.state import of_process

SILENCE_S = 15.0
"""Seconds without a heartbeat after which a rank is reported; a heartbeat continues while torch is busy."""
LONGEST_WAIT_S = 25.0
"""Seconds that a rank with failed communication waits for the report that names the dead one."""
_TICK_S = 1.0
_FAREWELL_S = 5.0
"""Seconds that a process which exits waits for its watching thread's exchange with the store."""
_PUBLISHED, _ENDED = "died", "ended"
_PEER_WORDS = ("gloo", "nccl", "hccl", "connection", "peer", "store")


class RankWatch:
    """One rank's side; call ``tick`` about once a second.

    Rank 0 watches all others, rank 1 watches rank 0; the one that finds a dead rank publishes a report for all.
    """

    def __init__(self, store: Any, rank: int, world_size: int, silence_s: float = SILENCE_S) -> None:
        self.found = ""
        """The report; empty until a rank has died."""
        self._store, self._rank = store, rank
        self._heartbeat = Heartbeat(store, rank)
        others = range(1, world_size) if rank == 0 else range(min(rank, 1))
        self._watch = Watch(store, [node for node in others if rank < 2], silence_s)
        store.set(f"place/{rank}", f"{socket.gethostname()}, process {os.getpid()}")

    def tick(self) -> None:
        """Increment the counter, check the others, and read published reports; raises the store's errors."""
        self._heartbeat.beat()
        if self.found:
            return
        if self._store.check([_PUBLISHED]):
            self.found = self._store.get(_PUBLISHED).decode()
            return
        for other in self._watch.gone():
            reason = self._watch.reasons.get(other)
            if reason != _ENDED:
                self._publish(other, reason)
                return

    def leave(self, error: BaseException | None = None) -> None:
        """Publish that this rank ends, and the reason; raises the store's errors."""
        self._heartbeat.leave(
            _ENDED if error is None else f"ended with {type(error).__name__}: {first_line(error)[:200]}"
        )

    def _publish(self, rank: int, reason: str | None) -> None:
        key = f"place/{rank}"
        place = self._store.get(key).decode() if self._store.check([key]) else "never seen"
        how = reason or "has sent no heartbeat since: killed (out of memory?), or its node is gone"
        self.found = f"rank {rank} ({place}) {how}"
        self._store.set(_PUBLISHED, self.found)


class _RankThread:
    """Runs this process's ``RankWatch`` in a background thread, and prints its report."""

    def __init__(self) -> None:
        self._watch: RankWatch | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._told = threading.Event()
        self._tell_at_once, self._left = True, False
        self._previous_hook = sys.excepthook

    def start(self, connect: Callable[[], Any], rank: int, world_size: int, silence_s: float) -> None:
        """Connect to the store and start the thread; if the store is unreachable, print a line and watch nothing."""
        if self._watch is not None or world_size == 1:
            return
        try:
            self._watch = RankWatch(connect(), rank, world_size, silence_s)
        except (RuntimeError, OSError, ValueError) as error:
            print(
                f"ranks are not watched: cannot connect to the store ({first_line(error)[:200]})",
                file=sys.stderr,
                flush=True,
            )
            return
        # Only the first and the last rank print the report at once; the others print it if they fail because of it.
        self._tell_at_once = rank in (0, world_size - 1)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self._end)
        arguments = (self._watch, silence_s)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True, name="rank watch")
        self._thread.start()

    def _run(self, watch: RankWatch, silence_s: float) -> None:
        while not self._over.wait(_TICK_S):
            try:
                watch.tick()
            except (RuntimeError, OSError):
                # At a normal end the store may close first: report only if this process does not end soon, too.
                if not self._over.wait(silence_s / 2):
                    watch.found = "the training's store is gone: rank 0, which holds it without torchrun, ended or died"
            if watch.found:
                break
        if watch.found and self._tell_at_once:
            self._tell(watch)
        while watch.found and not self._over.wait(_TICK_S):
            try:
                watch.tick()  # keep this rank's counter moving
            except (RuntimeError, OSError):
                return

    def _tell(self, watch: RankWatch) -> None:
        if not self._told.is_set():
            self._told.set()
            print(f"[rank {os.environ.get('RANK', '?')}] {watch.found}", file=sys.stderr, flush=True)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Replacement of ``sys.excepthook``: if a peer was lost, wait for the report that names it."""
        watch = self._watch
        self._previous_hook(kind, error, trace)
        if watch is None:
            return
        if _lost_a_peer(error):
            until = time.monotonic() + LONGEST_WAIT_S
            while not watch.found and time.monotonic() < until:
                time.sleep(_TICK_S / 10)
            if watch.found:
                self._tell(watch)
                time.sleep(2 * _TICK_S)  # if this rank holds the store, the others must read it first
        else:
            self._leave(error)

    def _end(self) -> None:
        self._over.set()
        if self._thread is not None:
            # If the interpreter ends while a thread is in the store's C++ code, the process aborts.
            self._thread.join(_FAREWELL_S)
        if not self._told.is_set():
            self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self._watch is not None and not self._left:
            self._left = True
            try:
                self._watch.leave(error)
            except (RuntimeError, OSError):
                return  # the store is gone: nobody can read the reason


def watch_ranks(silence_s: float = SILENCE_S) -> None:
    """Watch the ranks of the initialized ``torch.distributed`` job, through its store at MASTER_ADDR and MASTER_PORT.

    Call it on every rank; a second call does nothing, and neither does a call in a process that runs a rank alone.
    """
    import torch

    if torch.distributed.is_initialized() and not os.environ.get(ALONE_VARIABLE):
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        of_process(_RankThread).start(_connected, rank, world_size, silence_s)


def _connected() -> Any:
    """Return a separate connection to the training's store: a wait on the training's own connection would block it."""
    import datetime

    import torch

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port:
        raise ValueError("MASTER_ADDR or MASTER_PORT is not set")
    limit = datetime.timedelta(seconds=30)
    store = torch.distributed.TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=limit)
    return torch.distributed.PrefixStore("mindspeed_autoparallel/ranks", store)


def _lost_a_peer(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, (RuntimeError, OSError)) and any(word in text for word in _PEER_WORDS)
