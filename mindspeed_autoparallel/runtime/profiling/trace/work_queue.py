"""Profile points shared by tracing processes: a free process claims the next, and claims of a dead process
remain visible."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from mindspeed_autoparallel.profiles import MeasuredAt


class WorkQueue:
    """A folder with a file per point, which the process that claims the point moves into its own folder.

    A rename succeeds for one process only, on any shared storage, and needs no server process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting = folder / "waiting"

    def publish(self, points: Iterable[MeasuredAt], num_processes: int) -> None:
        """Publish work for processes 0 to ``num_processes - 1``; entries of an earlier queue are removed."""
        self.clear()
        for folder in (self._waiting, *(self._of(process) for process in range(num_processes))):
            folder.mkdir(parents=True)
        for point in points:
            (self._waiting / point.label()).touch()

    def claim(self, point: MeasuredAt, process: int) -> bool:
        """Claim ``point`` for ``process``; return whether it was still free."""
        try:
            (self._waiting / point.label()).rename(self._of(process) / point.label())
        except FileNotFoundError:
            return False
        return True

    def claimed_by(self, point: MeasuredAt, process: int) -> bool:
        """Return whether that process claimed ``point``."""
        return (self._of(process) / point.label()).exists()

    def clear(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _of(self, process: int) -> Path:
        return self.folder / f"process{process}"
