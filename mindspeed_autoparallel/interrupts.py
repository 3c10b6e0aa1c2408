"""Requests to end (a scheduler's SIGTERM, a closed terminal's SIGHUP) are handled like Ctrl-C: children first."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

_LOGGER = logging.getLogger(__name__)
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_INTERRUPTED = 128 + signal.SIGINT
_IMPORTING = "<frozen importlib._bootstrap>"
_RETRY_S = 0.02
_LONGEST_IMPORT_S = 20.0
LONGEST_WAIT_S = 0.2
"""Longest wait of the main thread for a lock: a signal that another thread receives does not end that wait."""
_held: list[int] | None = None
"""Signals received inside ``held_back``; ``None`` outside of it."""


class Terminated(KeyboardInterrupt):
    """Raised in the main thread when this process receives a request to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Stopped(KeyboardInterrupt):
    """A search was interrupted by ``cause`` and has the best plan so far: a ``Plan``, or the answers of ``tune`` or
    ``replan``."""

    def __init__(self, plan: Any, cause: KeyboardInterrupt) -> None:
        super().__init__("interrupted")
        self.plan, self.cause = plan, cause


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Raise ``Terminated`` inside the block on SIGTERM and SIGHUP, once, so that child processes end and files are
    closed.

    While a library is imported these signals and Ctrl-C wait until the import is done, at most 20 s: an exception
    inside its extension modules aborts the process or leaves a library that is half imported. Signals that are ignored
    (``nohup``) stay ignored. Outside the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    outer = _num_imports(sys._getframe())
    deadline: list[float] = []

    def waits(number: int, frame: FrameType | None) -> bool:
        if _held is not None:
            _held.append(number)
            return True
        if _num_imports(frame) <= outer:
            return False
        deadline[:] = deadline or [time.monotonic() + _LONGEST_IMPORT_S]
        if time.monotonic() > deadline[0]:
            return False
        again = threading.Timer(_RETRY_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
        return True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not waits(number, frame):
            raise KeyboardInterrupt

    def end(number: int, frame: FrameType | None) -> None:
        if waits(number, frame):
            return
        # Schedulers repeat the signal, and the second one must not interrupt the code that ends the children.
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(number)

    before = {
        number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    for number in before:
        signal.signal(number, end)
    own_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if own_interrupt:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if own_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delay the signals of ``ended_like_ctrl_c`` to the end of the block.

    Used while processes start: Python discards an exception inside a hook of fork, and one that is raised
    before the process is stored leaves it running. Outside the main thread nothing changes.
    """
    global _held
    if threading.current_thread() is not threading.main_thread() or _held is not None:
        yield
        return
    _held = []
    try:
        yield
    finally:
        received, _held = _held, None
        if received:
            signal.raise_signal(received[0])


def _num_imports(frame: FrameType | None) -> int:
    """Count the imports that ``frame`` is inside of."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == _IMPORTING and frame.f_code.co_name == "_find_and_load"
        frame = frame.f_back
    return count


def exit_code_of(error: KeyboardInterrupt) -> int:
    """Return the exit code that a shell reports for this signal: 128 plus its number."""
    if isinstance(error, Stopped):
        return exit_code_of(error.cause)
    return error.exit_code if isinstance(error, Terminated) else _INTERRUPTED


@contextlib.contextmanager
def leaving_kept(what_stays: str) -> Iterator[None]:
    """End this process at an interrupt (``ended_like_ctrl_c``), after a warning that names ``what_stays``."""
    try:
        with ended_like_ctrl_c():
            yield
    except KeyboardInterrupt as error:
        _LOGGER.warning("interrupted; %s", what_stays)
        sys.exit(exit_code_of(error))
