"""Something done again and again beside the main thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def repeating(action: Callable[[], None], every_s: float) -> Iterator[None]:
    """Inside, ``action`` is done every ``every_s`` seconds; it has ended on the way out."""
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
