"""Files are written whole or not at all, and read with errors that name them."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError


def write_text_atomic(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` through a temporary file beside it and a rename, so that no reader sees half a file.

    Raises ``ConfigError`` naming the path when the folder is missing, not writable, or the disk is full.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp gives 0600; a result is as readable as any file the user makes.
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot write {path}: {reason}. Free space there or choose another folder.") from error


def write_json_atomic(path: Path, value: Any) -> None:
    """``write_text_atomic`` of ``value`` as indented JSON; NaN and infinity are refused (``ValueError``)."""
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def made_folder(path: Path, flag: str) -> Path:
    """``path``, made where it is missing; raises ``ConfigError`` that names ``flag`` before any work is done for it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be a folder: {error.strerror or error}. Name another.") from error
    return path


def read_json(path: Path, what: str) -> Any:
    """The JSON in ``path``; raises ``ConfigError`` that names ``what``, the file, and the line of a syntax error."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read {what} {path}: {reason}.") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{what} {path} is not valid JSON: {where}: {error.msg}.") from error
    except RecursionError as error:
        raise ConfigError(f"{what} {path} is nested too deeply to be read.") from error
