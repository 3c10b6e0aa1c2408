"""Hashes the Python files that determine a trace: a change makes the trace stale."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError

_RUNTIME = Path(__file__).parents[2]
_TRACING_FOLDERS = tuple(
    (_RUNTIME / name).resolve()
    for name in (
        "profiling",
        "profiling/trace",
        "profiling/measure",
        "profiling/calibrate",
        "attention",
        "devices/cpu",
        "megatron",
        "../patching",
        "../profiles/knowledge",
    )
)


def hash_of_tracing_code() -> hashlib._Hash:
    """Return a hash of the modules in this package's tracing folders."""
    return _hash_of(_TRACING_FOLDERS)


def hash_of_sources(script: Path) -> hashlib._Hash:
    """Return a hash of the files beside ``script``, which usually contain custom layers, and of the tracing code.

    Folders and dangling links named ``*.py`` are skipped; a ``ConfigError`` names a file that may not be read.
    """
    return _hash_of((script.resolve().parent, *_TRACING_FOLDERS))


def _hash_of(folders: Iterable[Path]) -> hashlib._Hash:
    digest = hashlib.sha256()
    for folder in folders:
        for path in _python_files(folder):
            try:
                digest.update(path.read_bytes())
            except OSError as error:
                raise ConfigError(
                    f"cannot read {path}: {error.strerror}. A trace depends on the Python files beside the script; "
                    "make it readable or move it away."
                ) from error
    return digest


def _python_files(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.glob("*.py")) if path.is_file())


def release_of(package: str) -> str:
    """Return the release of a package; ``none`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
