"""Ends a process that runs a rank alone if its script waits for a peer before the first step.

Collectives return at once here, but a script may wait for peers through other means: a store, a socket, a file that
rank 0 writes. Such a process is idle: it and its children neither run nor wait for a core, it reads no data, and its
main thread stays on one line of code. A loop that polls without sleeping looks like work: its line is printed once,
and the launch's time limit ends it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from mindspeed_autoparallel.runtime.state import of_process

_STILL_S = 20.0
_SAMPLE_S = 0.5
_SAME_SHARE = 0.9
"""Share of the samples on one line: a polling loop is nearly always in its sleep."""
_BUSY_SHARE = 0.05
"""Share of the time for which a process that computes, or its data workers, at least run or wait for a core."""
_READ_BYTES = 1 << 20
"""A process that reads data from a slow disk reads more than this in the same time."""


class _Steps:
    """Whether the script has reached its first step."""

    def __init__(self) -> None:
        self.have_begun = False


def begin_steps() -> None:
    """Record the end of the script's set-up, after which it waits for no absent peer."""
    of_process(_Steps).have_begun = True


def watch_for_stalls() -> None:
    """Watch the main thread until ``begin_steps``; if it is idle, print its location and exit with 1."""
    threading.Thread(target=_watch, args=(of_process(_Steps),), name="stalls", daemon=True).start()


def _watch(steps: _Steps) -> None:
    thread = threading.main_thread().ident or 0
    size = round(_STILL_S / _SAMPLE_S)
    places: collections.deque[str] = collections.deque(maxlen=size)
    work: collections.deque[tuple[float, int]] = collections.deque(maxlen=size)
    printed: set[str] = set()
    busy = _Busy()
    while not steps.have_begun:
        places.append(_place(thread))
        work.append((busy.seconds(), _bytes_read()))
        place, count = collections.Counter(places).most_common(1)[0]
        if len(places) == size and count >= _SAME_SHARE * size and place:
            if work[-1][0] - work[0][0] < _BUSY_SHARE * _STILL_S and work[-1][1] - work[0][1] < _READ_BYTES:
                line = f"the script has waited {_STILL_S:.0f} s for a peer at {place}; a rank that runs alone has none"
                print(line, file=sys.stderr, flush=True)
                os._exit(1)
            if place not in printed:
                printed.add(place)
                print(f"the script has been at {place} for {_STILL_S:.0f} s", file=sys.stderr, flush=True)
        time.sleep(_SAMPLE_S)


class _Busy:
    """Time for which threads of this process and its children ran or waited for a core."""

    def __init__(self) -> None:
        self._total = 0.0
        self._seen: dict[Path, float] = {}

    def seconds(self) -> float:
        """Return the sum so far; threads that have ended since the last call count up to that call."""
        found = {}
        for task in _tasks(os.getpid()):
            with contextlib.suppress(OSError, ValueError):
                ran, waited, _ = (task / "schedstat").read_text(encoding="ascii").split()
                found[task] = (int(ran) + int(waited)) / 1e9
        self._total += sum(value - self._seen.get(task, 0.0) for task, value in found.items())
        self._seen = found
        return self._total if found else time.process_time()


def _tasks(process: int) -> Iterator[Path]:
    """Yield the threads of a process and of its children in /proc."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            yield task
            for child in (task / "children").read_text(encoding="ascii").split():
                yield from _tasks(int(child))


def _place(thread: int) -> str:
    """Return file, line and text of the innermost frame outside of Python's and torch's own libraries."""
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame) if frame is not None else []
    own = [item for item in frames if "site-packages" not in item.filename and "/lib/python" not in item.filename]
    if not own:
        return ""
    innermost = own[-1]
    return f"{innermost.filename}:{innermost.lineno} ({innermost.line})"


def _bytes_read() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])
    return 0
