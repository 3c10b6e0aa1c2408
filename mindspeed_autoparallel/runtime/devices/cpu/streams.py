"""Streams, events and their contexts: everything on CPU is done when the call returns."""

from __future__ import annotations

import contextlib
import time
from typing import Any


class Event:
    """A time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        """Take the time now."""
        self.time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: it is done."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Return milliseconds from this event to ``other``."""
        return (other.time - self.time) * 1e3


class Stream:
    """The only stream there is; all its instances are equal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = self.cuda_stream = self.device_index = 0

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: it is done."""
        return True

    def is_capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event recorded now."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the priorities that CUDA returns."""
        return (0, -1)


class StreamContext(contextlib.AbstractContextManager[Any]):
    """``with torch.cuda.stream(...)`` and ``with torch.cuda.device(...)``."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *exception: object) -> None:
        return None


CURRENT = Stream()
