"""What a measuring launch found before it was cut off, so that the next run need not measure it again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.runtime.profiling.calibrate.worker import LINKS_FILE, OPERATORS_FILE

_FILE = "measuring.json"
"""Lies in the folder from before the launch until its figures are in the knowledge base, and until a launch after one
that failed has measured the rest."""


class MeasurementJournal:
    """The folder that a launch of ``device`` and ``software`` (keys of the knowledge base) measures into."""

    def __init__(self, folder: Path, device: str, software: str) -> None:
        self.folder = folder
        self._mark = folder / _FILE
        self._about = {"schema_version": 1, "device": device, "software": software}
        self._unfinished = {**self._about, "unfinished": True}

    @property
    def pending(self) -> bool:
        """Tell whether figures of this device and software lie here that no knowledge base has."""
        return self._is_marked(self._about)

    def open(self, results: list[Path]) -> None:
        """Begin a launch that writes ``results``: what earlier ones left, perhaps on another device, goes."""
        for path in (self.folder / LINKS_FILE, self.folder / OPERATORS_FILE, *results):
            path.unlink(missing_ok=True)
        write_json_atomic(self._mark, self._about)

    @property
    def unfinished(self) -> bool:
        """Tell whether the last launch of this device and software failed before it had measured everything."""
        return self._is_marked(self._unfinished)

    def commit(self, *, finished: bool = True) -> None:
        """End it: what was measured is in the knowledge base. ``finished``: whether that is all of the launch."""
        if finished:
            self._mark.unlink(missing_ok=True)
        else:
            write_json_atomic(self._mark, self._unfinished)

    def _is_marked(self, about: Mapping[str, object]) -> bool:
        try:
            return self._mark.exists() and read_json(self._mark, "mark of a measuring launch") == about
        except ConfigError:
            return False
