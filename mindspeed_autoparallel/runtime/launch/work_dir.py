"""The folder of a run: private, and used by one run at a time; the error of a second run names the first."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import loads_json, shown
from mindspeed_autoparallel.progress import repeating

LOCK_FILE = ".lock"
HOLDER_FILE = ".holder"
_BEAT_S = 1.0
_WATCHED_S = 6.0
"""Seconds that a holder on another node is watched; a shared file system shows its writes with a delay."""
_LENGTH = 400
"""Size of the holder's file: constant, so that a reader never sees an empty one."""

_LOGS = "logs"
"""Folder that an agent may create before node 0 uses the work dir."""


@contextlib.contextmanager
def only_one(work_dir: Path, flag: str) -> Iterator[None]:
    """Hold ``work_dir``, which ``flag`` names, until the context ends; a ``ConfigError`` names the current holder.

    On one machine ``flock`` decides; the system releases it however the holder dies. Some shared file systems keep such
    locks per node, so the holder also increments a counter in a file: a holder on another node keeps the folder as long
    as its counter changes.
    """
    path = work_dir / HOLDER_FILE
    with _opened(work_dir / LOCK_FILE) as stream:
        locked = _lock(stream, path, flag)
        holder = _read(path)
        if holder and not (locked and holder.get("machine") == _machine()) and _counts(path, holder):
            raise _held(path, flag)
        with _counting(path):
            yield


def _opened(path: Path) -> IO[bytes]:
    """Open a file of this package for writing, never through a link placed by another user."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600), "wb")
    except OSError as error:
        raise ConfigError(f"cannot lock {path.parent}: {path.name}: {error.strerror or error}. Remove it.") from error


def _lock(stream: IO[bytes], path: Path, flag: str) -> bool:
    """Take the lock; return whether this file system supports locks."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _held(path, flag) from error
    except OSError:
        return False
    return True


def _held(path: Path, flag: str) -> ConfigError:
    holder = _read(path)
    who = f"process {shown(holder['pid'])} on {shown(str(holder['host']))}" if holder else "unknown process"
    return ConfigError(f"another run uses {path.parent} ({who}). Wait for it, end it, or choose another {flag}.")


def _read(path: Path) -> dict[str, object]:
    """Read the holder's file, reopened each time: a shared file system checks for changes on open."""
    with contextlib.suppress(OSError, ValueError):
        holder = loads_json(path.read_text(encoding="utf-8"))
        if isinstance(holder, dict) and {"host", "pid", "count"} <= set(holder):
            return holder
    return {}


def _counts(path: Path, holder: dict[str, object]) -> bool:
    deadline = time.monotonic() + _WATCHED_S
    while time.monotonic() < deadline:
        time.sleep(_BEAT_S / 4)
        now = _read(path)
        if now and now["count"] != holder["count"]:
            return True
    return False


@contextlib.contextmanager
def _counting(path: Path) -> Iterator[None]:
    about = {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid()}

    numbers = itertools.count(time.time_ns())  # above the counters of all earlier holders

    def write() -> None:
        text = json.dumps({**about, "count": next(numbers)}).ljust(_LENGTH)
        # In place and without fsync: closing the file makes it visible to other nodes. The run reports a full disk.
        with contextlib.suppress(OSError, ConfigError), _opened(path) as stream:
            os.pwrite(stream.fileno(), text.encode(), 0)

    write()
    try:
        with repeating(write, _BEAT_S):
            yield
    finally:
        path.unlink(missing_ok=True)


def _machine() -> str:
    """Return the boot id, which all containers of a machine share, as they share file locks; else the host name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()


def private_work_dir(name: str, flag: str) -> Path:
    """Make folder ``name``, the value of ``flag``, readable by this user only.

    Raises ``ConfigError`` if it belongs to another user, is open to others and not empty, or cannot be written.
    """
    try:
        work_dir = Path(name).resolve()
        if work_dir.exists() and not work_dir.is_dir():
            raise ConfigError(f"{flag} {work_dir} is a file; name a folder.")
        if work_dir.is_dir() and work_dir.stat().st_uid != os.geteuid():
            raise ConfigError(f"{flag} {work_dir} belongs to another user. Name a folder of your own.")
        if work_dir.is_dir() and not _is_ours(work_dir):
            # Making it private would lock its other users out.
            raise ConfigError(
                f"{flag} {work_dir} can be read by others and holds other files. Name a separate folder, such as one "
                "inside it; only you will be able to read it."
            )
        work_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        work_dir.chmod(0o700)
        # An unnamed file, because another node may probe the same folder at this moment.
        with tempfile.TemporaryFile(dir=work_dir) as probe:
            probe.write(b"probe")
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"cannot write to the work dir {shown(name, 200)}: {getattr(error, 'strerror', None) or error}. Free space "
            f"there, or choose another with {flag}."
        ) from error
    return work_dir


def _is_ours(folder: Path) -> bool:
    private = not folder.stat().st_mode & 0o077
    return private or (folder / LOCK_FILE).exists() or {path.name for path in folder.iterdir()} <= {_LOGS}
