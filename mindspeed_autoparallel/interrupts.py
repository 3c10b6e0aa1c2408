"""Being told to end (a scheduler's SIGTERM, a closed terminal's SIGHUP) is handled as Ctrl-C is: children first."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_LOGGER = logging.getLogger(__name__)
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_INTERRUPTED = 128 + signal.SIGINT


class Terminated(KeyboardInterrupt):
    """Raised where the main thread is when this process is told to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Raise ``Terminated`` inside the block on SIGTERM and SIGHUP, once, so that what was started is ended and files
    are closed.

    Signals that are ignored (``nohup``) stay ignored. Outside the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        # Schedulers repeat themselves, and the second word must not break what ends the children.
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise Terminated(number)

    before = {
        number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code_of(error: KeyboardInterrupt) -> int:
    """Return what a shell calls this end: 128 and the signal's number."""
    return error.exit_code if isinstance(error, Terminated) else _INTERRUPTED


@contextlib.contextmanager
def leaving_kept(what_stays: str) -> Iterator[None]:
    """End this process at an interrupt (``ended_like_ctrl_c``), after a warning that tells ``what_stays``."""
    try:
        with ended_like_ctrl_c():
            yield
    except KeyboardInterrupt as error:
        _LOGGER.warning("interrupted; %s", what_stays)
        sys.exit(exit_code_of(error))
