"""Results of a measuring launch: their device and software, and whether all of them are in the knowledge base."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.profiles.calibration_records import LinkRows, OperatorRows
from mindspeed_autoparallel.profiles.records import read_record

CALIBRATION_SCHEMA_VERSION = 1
LINKS_FILE, OPERATORS_FILE = "links.json", "operators.json"
_HARDWARE = ("device", "num_cores", "num_threads")

_FILE = "measuring.json"
"""Marker file: exists from before the launch until its figures are in the knowledge base; after a failed launch, until
another one has measured the rest."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Keys of the knowledge base, which separate samples of different devices and releases."""

    name: str
    """Display name of the device."""
    device: str
    software: str


def fingerprint_of(device: Any) -> Fingerprint:
    """Return the keys of a device adapter."""
    found = device.fingerprint()
    hardware = " ".join(f"{key} {found[key]}" for key in _HARDWARE[1:] if found.get(key))
    return Fingerprint(
        name=found["device"],
        device=" ".join(filter(None, (found["device"], hardware))),
        software=" ".join(f"{key} {value}" for key, value in sorted(found.items()) if key not in _HARDWARE),
    )


class MeasurementJournal:
    """The folder that a launch of ``device`` and ``software`` (keys of the knowledge base) measures into."""

    def __init__(self, folder: Path, device: str, software: str) -> None:
        self.folder = folder
        self._mark = folder / _FILE
        self._about = {"schema_version": 1, "device": device, "software": software}
        self._unfinished = {**self._about, "unfinished": True}

    @property
    def pending(self) -> bool:
        """Return whether this folder has figures of this device and software that are not in a knowledge base."""
        return self._is_marked(self._about)

    def open(self, results: list[Path]) -> None:
        """Begin a launch that writes ``results``; remove earlier results, which may be of another device."""
        for path in (self.folder / LINKS_FILE, self.folder / OPERATORS_FILE, *results):
            path.unlink(missing_ok=True)
        write_json_atomic(self._mark, self._about)

    @property
    def unfinished(self) -> bool:
        """Return whether the last launch of this device and software failed before it had measured everything."""
        return self._is_marked(self._unfinished)

    def commit(self, *, finished: bool = True) -> None:
        """End a launch whose figures are recorded. ``finished``: whether the launch measured everything."""
        if finished:
            self._mark.unlink(missing_ok=True)
        else:
            write_json_atomic(self._mark, self._unfinished)

    def _is_marked(self, about: Mapping[str, object]) -> bool:
        try:
            return self._mark.exists() and read_json(self._mark, "mark of a measuring launch") == about
        except ConfigError:
            return False


def read_operators(folder: Path, since: float = 0.0) -> OperatorRows:
    """Return the results of replays in ``folder``; empty if none is as new as ``since`` (seconds since the epoch)."""
    path = folder / OPERATORS_FILE
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mtime >= since:
            return read_record(path, "calibration", OperatorRows)
    return OperatorRows()


def read_links(folder: Path) -> LinkRows:
    """Return the samples of collectives in ``folder``; empty if no launch wrote any."""
    path = folder / LINKS_FILE
    return read_record(path, "calibration", LinkRows) if path.exists() else LinkRows()
