"""Profile points shared by tracing processes: who is free claims the next, and what a process died at is known."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from mindspeed_autoparallel.profiles import MeasuredAt


class WorkQueue:
    """A folder with a file per point, which the process that claims the point moves into a folder of its own.

    A rename succeeds for one process only, whatever storage they share, and needs no live process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting = folder / "waiting"

    def publish(self, points: Iterable[MeasuredAt], num_processes: int) -> None:
        """Publish work for processes 0 to ``num_processes - 1``; whatever an earlier queue left goes."""
        self.clear()
        for folder in (self._waiting, *(self._of(process) for process in range(num_processes))):
            folder.mkdir(parents=True)
        for point in points:
            (self._waiting / point.label()).touch()

    def claim(self, point: MeasuredAt, process: int) -> bool:
        """Return whether ``point`` is now that process's, and no other's."""
        try:
            (self._waiting / point.label()).rename(self._of(process) / point.label())
        except FileNotFoundError:
            return False
        return True

    def claimed_by(self, point: MeasuredAt, process: int) -> bool:
        """Return whether that process claimed ``point``."""
        return (self._of(process) / point.label()).exists()

    def clear(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _of(self, process: int) -> Path:
        return self.folder / f"process{process}"
