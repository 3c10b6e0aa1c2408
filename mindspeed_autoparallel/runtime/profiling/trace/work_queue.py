"""Points handed out to tracing processes: who is free takes the next, and what a process died at is known."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from mindspeed_autoparallel.profiles import MeasuredAt


class Handout:
    """A folder with a file per point, which the process that takes the point moves into a folder of its own.

    A rename succeeds for one process only, whatever storage they share, and needs nobody who is still alive.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting = folder / "waiting"

    def lay_out(self, points: Iterable[MeasuredAt], num_processes: int) -> None:
        """Lay out work for processes 0 to ``num_processes - 1``; whatever an earlier handout left goes."""
        self.clear()
        for folder in (self._waiting, *(self._of(process) for process in range(num_processes))):
            folder.mkdir(parents=True)
        for point in points:
            (self._waiting / point.label()).touch()

    def take(self, point: MeasuredAt, process: int) -> bool:
        """Return whether ``point`` is now that process's, and no other's."""
        try:
            (self._waiting / point.label()).rename(self._of(process) / point.label())
        except FileNotFoundError:
            return False
        return True

    def took(self, point: MeasuredAt, process: int) -> bool:
        """Return whether that process took ``point``."""
        return (self._of(process) / point.label()).exists()

    def clear(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _of(self, process: int) -> Path:
        return self.folder / f"process{process}"
