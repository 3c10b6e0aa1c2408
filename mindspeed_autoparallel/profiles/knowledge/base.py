"""The operator knowledge base: one sqlite file that several processes may write at once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.files import read_json, shown, write_json_atomic
from mindspeed_autoparallel.profiles.knowledge.signature import Signature

SCHEMA_VERSION = 1
PATIENCE_S = 60.0
"""Seconds to wait for another writer; one transaction takes milliseconds."""
_TABLES = (
    "create table if not exists about (schema_version integer not null)",
    """
    create table if not exists samples (
        device text not null, software text not null, operator text not null, signature text not null,
        sizes text not null, median_us real not null, p10_us real not null, p90_us real not null,
        num_runs integer not null, source text not null, measured_at real not null,
        primary key (device, software, operator, signature, sizes)
    )
    """,
)
EXPORT_SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator call, identified by all that determines its cost."""

    name: str
    """For example ``aten.mm.default``."""
    signature: Signature
    """Everything that is not a size."""
    sizes: tuple[int, ...]
    """All dimensions of all tensor arguments, in order."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Measured times of one operator, in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    num_runs: int
    source: str
    measured_at: float = 0.0
    """Seconds since the epoch; 0 is replaced by now when recorded."""


_FIGURES = tuple(field.name for field in dataclasses.fields(Sample))


class KnowledgeBase:
    """Samples in ``path``, keyed by device and software fingerprint, so that other hardware or releases never mix."""

    def __init__(self, path: Path) -> None:
        """Open or create the file; raises ``ProfileError`` when it is no knowledge base or of another version."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        with self._connection() as connection:
            tables = {row[0] for row in connection.execute("select name from sqlite_master where type='table'")}
            if not tables:
                self._create(connection)
            elif "about" not in tables:
                raise self._unusable("it is another kind of database")
            # No lock is taken: a base that another process writes to can be opened.
            found = connection.execute("select schema_version from about").fetchone()
        if found is None or found[0] != SCHEMA_VERSION:
            raise ProfileError(
                f"knowledge base {path} has schema version {None if found is None else found[0]}, this release reads "
                f"{SCHEMA_VERSION}. Export it with the release that wrote it, or name another file."
            )

    @staticmethod
    def _create(connection: sqlite3.Connection) -> None:
        connection.execute("pragma journal_mode=wal")
        connection.execute("begin immediate")
        for statement in _TABLES:
            connection.execute(statement)
        # Two processes may create it at once; the second waited here and finds the row.
        connection.execute("insert into about select ? where not exists (select * from about)", (SCHEMA_VERSION,))
        connection.commit()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        # A connection per use: sqlite handles are safe neither across threads nor across forks.
        connection = None
        try:
            check = self.path.exists() and not os.access(self.path.parent, os.W_OK)
            # Where nothing can be written next to it, a base is read as it lies there: sqlite makes files to lock it.
            name = f"{self.path.absolute().as_uri()}?mode=ro&immutable=1" if check else str(self.path)
            connection = sqlite3.connect(name, timeout=PATIENCE_S, isolation_level=None, uri=check)
            yield connection
        except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
            raise self._unusable(shown(str(error), 200)) from error
        finally:
            if connection is not None:
                connection.close()

    def _unusable(self, error: object) -> ProfileError:
        text = str(error)
        if "locked" in text:
            way_out = f"Another process has been writing to it for over {PATIENCE_S:.0f} s: check that process."
        elif "full" in text or "disk I/O" in text:
            way_out = "Free space there; the measurements are kept in the work dir and the next run adds them."
        elif "readonly" in text:
            way_out = "Copy it to a writable folder, and name the copy."
        else:
            way_out = "Move it away to start a new one, or import an intact export."
        return ProfileError(f"knowledge base {self.path} cannot be used: {text}. {way_out}")

    def record(self, device: str, software: str, entries: Iterable[tuple[Operator, Sample]]) -> None:
        """Store samples in one transaction. Of two samples of one operator the one with more runs stays."""
        rows = []
        for operator, sample in entries:
            sizes = json.dumps(operator.sizes)
            if not 0 < sample.p10_us <= sample.median_us <= sample.p90_us:
                raise ProfileError(
                    f"sample of {operator.name} {sizes} has times p10 {sample.p10_us}, median {sample.median_us}, p90 "
                    f"{sample.p90_us} us."
                )
            *figures, measured_at = dataclasses.astuple(sample)
            key = (device, software, operator.name, operator.signature.text, sizes)
            rows.append((*key, *figures, measured_at or time.time()))
        with self._connection() as connection:
            connection.execute("begin immediate")
            connection.executemany(
                "insert into samples values (?,?,?,?,?,?,?,?,?,?,?) on conflict do update set "
                "median_us=excluded.median_us, p10_us=excluded.p10_us, p90_us=excluded.p90_us, "
                "num_runs=excluded.num_runs, source=excluded.source, measured_at=excluded.measured_at "
                "where excluded.num_runs >= samples.num_runs",
                rows,
            )
            connection.commit()

    def find(self, device: str, software: str, operator: Operator) -> Sample | None:
        """Return the sample of exactly this operator."""
        found = self._select(
            "where device=? and software=? and operator=? and signature=? and sizes=?",
            *(device, software, operator.name, operator.signature.text, json.dumps(operator.sizes)),
        )
        return found[0][3] if found else None

    def neighbours(self, device: str, software: str, operator: Operator) -> list[tuple[tuple[int, ...], Sample]]:
        """Return all samples of the same name and signature, whatever their sizes."""
        found = self._select(
            "where device=? and software=? and operator=? and signature=?",
            *(device, software, operator.name, operator.signature.text),
        )
        return [(other.sizes, sample) for _, _, other, sample in found]

    def of_name(self, device: str, software: str, name: str) -> list[tuple[Operator, Sample]]:
        """Return all samples called ``name``, whatever their signature and sizes, in a stable order."""
        found = self._select("where device=? and software=? and operator=? order by 4, 5", device, software, name)
        return [(operator, sample) for _, _, operator, sample in found]

    def fingerprints(self) -> list[tuple[str, str, int]]:
        """Return (device, software, number of samples) of everything stored."""
        with self._connection() as connection:
            return [
                (str(device), str(software), int(count))
                for device, software, count in connection.execute(
                    "select device, software, count(*) from samples group by device, software order by 1, 2"
                )
            ]

    def entries(self) -> list[tuple[str, str, Operator, Sample]]:
        """Return everything stored, in a stable order."""
        return self._select("order by 1, 2, 3, 4, 5")

    def _select(self, which: str, *values: str) -> list[tuple[str, str, Operator, Sample]]:
        with self._connection() as connection:
            rows = connection.execute(f"select * from samples {which}", values).fetchall()
        return [
            (
                device,
                software,
                Operator(name=name, signature=Signature.of_json(text), sizes=tuple(json.loads(sizes))),
                Sample(**dict(zip(_FIGURES, figures, strict=True))),
            )
            for device, software, name, text, sizes, *figures in rows
        ]


def export_knowledge(base: KnowledgeBase, path: Path) -> int:
    """Write all samples to ``path`` as JSON; returns how many."""
    entries = [
        {
            "device": device,
            "software": software,
            "name": operator.name,
            "signature": operator.signature.json(),
            "sizes": list(operator.sizes),
            **dataclasses.asdict(sample),
        }
        for device, software, operator, sample in base.entries()
    ]
    write_json_atomic(path, {"schema_version": EXPORT_SCHEMA_VERSION, "samples": entries})
    return len(entries)


def import_knowledge(base: KnowledgeBase, path: Path) -> int:
    """Read an export into ``base``; nothing is stored when any entry is broken. Returns how many were read."""
    document = read_json(path, "knowledge export")
    if not isinstance(document, dict) or document.get("schema_version") != EXPORT_SCHEMA_VERSION:
        version = document.get("schema_version") if isinstance(document, dict) else None
        raise ConfigError(
            f"knowledge export {path} has schema_version {version}, this release reads {EXPORT_SCHEMA_VERSION}."
        )
    grouped: dict[tuple[str, str], list[tuple[Operator, Sample]]] = defaultdict(list)
    samples = document.get("samples")
    if not isinstance(samples, list):
        raise ConfigError(f"knowledge export {path} has no list of samples.")
    for index, entry in enumerate(samples):
        try:
            grouped[str(entry["device"]), str(entry["software"])].append(_entry(entry))
        except (KeyError, TypeError, ValueError, OverflowError, ProfileError) as error:
            reason = shown(str(error) if isinstance(error, ProfileError) else repr(error), 200)
            raise ProfileError(f"knowledge export {path}: sample {index} is broken: {reason}.") from error
    for (device, software), entries in grouped.items():
        base.record(device, software, entries)
    return len(samples)


def _entry(entry: dict[str, Any]) -> tuple[Operator, Sample]:
    operator = Operator(
        name=str(entry["name"]),
        signature=Signature.of_json(entry["signature"]),
        sizes=tuple(int(size) for size in entry["sizes"]),
    )
    sample = Sample(
        median_us=float(entry["median_us"]),
        p10_us=float(entry["p10_us"]),
        p90_us=float(entry["p90_us"]),
        num_runs=int(entry["num_runs"]),
        source=str(entry["source"]),
        measured_at=float(entry["measured_at"]),
    )
    if not 0 < sample.p10_us <= sample.median_us <= sample.p90_us:
        raise ValueError(f"p10 {sample.p10_us}, median {sample.median_us}, p90 {sample.p90_us} us")
    return operator, sample
