"""Prints the package's log while it works, and logs the progress of long operations."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

_EVERY_S = 15.0
_LOGGER = logging.getLogger(__package__)


class _Terminal(logging.Handler):
    """Prints records as ``[title 12.3 s] text``; the time counts from the creation of the handler."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title, self._started = title, time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Print ``record`` to the current ``sys.stdout``."""
        print(f"[{self._title} {time.monotonic() - self._started:6.1f} s] {record.getMessage()}", flush=True)


def show_progress(title: str, level: str = "info") -> None:
    """Print the package's records at ``level`` (``debug``, ``info``, ``warning``) and above; no other handler receives
    them."""
    _LOGGER.handlers[:] = [_Terminal(title)]
    _LOGGER.setLevel(level.upper())
    _LOGGER.propagate = False  # hosts add their own handlers to the root logger


@contextlib.contextmanager
def changes_logged(describe: Callable[[], str], every_s: float = _EVERY_S) -> Iterator[None]:
    """Call ``describe`` every ``every_s`` seconds inside the block, and log its result when it has changed."""
    last = describe()

    def log() -> None:
        nonlocal last
        if (line := describe()) != last:
            _LOGGER.info(line)
            last = line

    with repeating(log, every_s):
        yield


@contextlib.contextmanager
def repeating(action: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call ``action`` every ``every_s`` seconds in a thread while the block runs; the thread ends with the block."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            action()

    repeater = threading.Thread(target=repeat, daemon=True)
    repeater.start()
    try:
        yield
    finally:
        ended.set()
        repeater.join()
