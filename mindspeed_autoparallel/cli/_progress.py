"""Progress of a command: lines on standard error, a bar on a terminal, nothing with ``--quiet``."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from mindspeed_autoparallel.interrupts import Stopped, exit_code_of
from mindspeed_autoparallel.planner.best_first import Progress, Status, silent
from mindspeed_autoparallel.progress import repeating

_SILENCE_S = 2.0
"""Seconds without output after which a command reports that it is still running."""
_WAITS_S = (2.0, 10.0, 30.0)
"""Seconds of silence before such reports in a pipe: before the first, the second, and every further one."""
_BAR = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--quiet`` and ``--verbose``, which every command has."""
    how = parser.add_mutually_exclusive_group()
    add = how.add_argument
    add("-q", "--quiet", action="store_true", help="no progress on standard error")
    add("-v", "--verbose", action="store_true", help="also log to standard error")


class _Shown:
    """Lines on standard error; on a terminal a status line replaces the one before it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._terminal, self._arguments = sys.stderr.isatty(), arguments
        self._started = self._last = time.monotonic()
        self._lock, self._is_open = threading.Lock(), False

    @property
    def silent_s(self) -> float:
        """Return seconds since the last line."""
        return time.monotonic() - self._last

    @property
    def is_printing(self) -> bool:
        """Return whether a line is being written."""
        return self._lock.locked()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def show(self, text: str) -> None:
        """Print a line; a ``Status`` is replaced by the next line on a terminal."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._last = time.monotonic()
            if not self._terminal:
                print(text, file=sys.stderr, flush=True)
                return
            width = shutil.get_terminal_size().columns - 1
            line = f"{self._bar()}{text}" if isinstance(text, Status) else text
            end = "" if isinstance(text, Status) else "\n"
            sys.stderr.write("\r\x1b[K" * self._is_open + (line[:width] if not end else line) + end)
            sys.stderr.flush()
            self._is_open = not end

    def close(self) -> None:
        """Clear the status line."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._is_open:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            self._is_open = False

    def _bar(self) -> str:
        limit_s = getattr(self._arguments, "time_limit_s", None)
        if not limit_s:
            return f"{self.seconds:4.0f} s  "
        share = min(1.0, self.seconds / limit_s)
        full = round(share * _BAR)
        return f"[{'#' * full}{'-' * (_BAR - full)}] {self.seconds:.0f} of {limit_s:g} s  "


def progress_of(arguments: argparse.Namespace) -> Progress:
    """Return the function that prints the progress of a command's searches."""
    shown: _Shown | None = getattr(arguments, "shown", None)
    return silent if shown is None else shown.show


def code_after_interrupt(stopped: Stopped, found: str = "plan") -> int:
    """Print that an interrupted search ends with the best ``found`` so far; return the command's exit code."""
    print(f"interrupted: the best {found} so far", file=sys.stderr, flush=True)
    return exit_code_of(stopped)


@contextlib.contextmanager
def _alarms(action: Callable[[], None], every_s: float) -> Iterator[None]:
    """Run ``action`` every ``every_s`` seconds inside the block, by a timer's signal: forked processes inherit no
    timer.

    Has no effect where signals cannot be handled (another thread, Windows).
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, lambda *_: action())
    timer = signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@contextlib.contextmanager
def shown_progress(arguments: argparse.Namespace, works_alone: bool) -> Iterator[None]:
    """Let ``progress_of(arguments)`` print inside the block. ``works_alone``: the command does not fork, so that a
    thread may report that it is still running; otherwise a timer's signal does."""
    if getattr(arguments, "quiet", False):
        yield
        return
    shown = arguments.shown = _Shown(arguments)
    told = 0

    def tell() -> None:
        nonlocal told
        if shown.is_printing:
            return  # a signal between two lines of ``show``
        wait = _WAITS_S[min(told, len(_WAITS_S) - 1)] if not sys.stderr.isatty() else _SILENCE_S
        if shown.silent_s >= wait:
            told += 1
            shown.show(Status(f"{arguments.command}: working, {shown.seconds:.0f} s"))

    with contextlib.ExitStack() as stack:
        stack.callback(shown.close)
        stack.enter_context(repeating(tell, 0.5) if works_alone else _alarms(tell, 0.5))
        yield
