"""Lines on how far a launch has come, read off the files it writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mindspeed_autoparallel.runtime.features.auto_tuning.repeating import repeating

EVERY_S = 15.0


@contextlib.contextmanager
def telling(say: Callable[[str], None], describe: Callable[[], str], every_s: float = EVERY_S) -> Iterator[None]:
    """Inside, ``describe`` is asked every ``every_s`` seconds and said when it has changed."""
    last = describe()

    def tell() -> None:
        nonlocal last
        if (line := describe()) != last:
            say(line)
            last = line

    with repeating(tell, every_s):
        yield


def num_written(files: Iterable[Path], since: float) -> int:
    """How many of ``files`` were written after ``since``, in seconds of the clock; an earlier run's do not count."""
    return sum(_is_newer(file, since) for file in files)


def _is_newer(file: Path, since: float) -> bool:
    try:
        return file.stat().st_mtime >= since
    except OSError:  # not there yet
        return False
