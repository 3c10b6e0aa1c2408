"""One tuning run per work dir: the second says who holds it, on this node and on others that share the storage."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.progress import repeating

LOCK_FILE = ".lock"
HOLDER_FILE = ".holder"
_BEAT_S = 1.0
_WATCHED_S = 6.0
"""A holder on another node is watched this long; a shared file system shows what it writes a little later."""
_LENGTH = 400
"""Of what the holder's file has: always the same, so that a reader never sees an empty one."""


@contextlib.contextmanager
def only_one(work_dir: Path) -> Iterator[None]:
    """Hold ``work_dir`` until the context ends; ``ConfigError`` names the process that holds it already.

    On one machine the system's file lock decides, and lets go when the holder dies, however it does. Some shared file
    systems keep such locks on each node for itself, so the holder also counts up in a file, and one on another node
    that still does is believed.
    """
    path = work_dir / HOLDER_FILE
    with (work_dir / LOCK_FILE).open("a", encoding="utf-8") as stream:
        locked = _lock(stream, path)
        holder = _read(path)
        if holder and not (locked and holder.get("machine") == _machine()) and _counts(path, holder):
            raise _held(path)
        with _counting(path):
            yield


def _lock(stream: TextIO, path: Path) -> bool:
    """Whether this file system has locks at all."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _held(path) from error
    except OSError:
        return False
    return True


def _held(path: Path) -> ConfigError:
    holder = _read(path)
    who = f"process {holder['pid']} on {holder['host']}" if holder else "it does not say which process"
    return ConfigError(
        f"another tuning run is at work in {path.parent} ({who}). Wait for it, end it, or choose another "
        "--auto-tuning-work-dir."
    )


def _read(path: Path) -> dict[str, Any]:
    """Opened anew each time: that is when a shared file system looks whether it has changed."""
    with contextlib.suppress(OSError, ValueError):
        holder = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(holder, dict) and {"host", "pid", "count"} <= set(holder):
            return holder
    return {}


def _counts(path: Path, holder: dict[str, Any]) -> bool:
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

    numbers = itertools.count(time.time_ns())  # from where no earlier holder was

    def write() -> None:
        text = json.dumps({**about, "count": next(numbers)}).ljust(_LENGTH)
        with contextlib.suppress(OSError):  # the run itself says that a disk is full
            _overwrite(path, text.encode())

    write()
    try:
        with repeating(write, _BEAT_S):
            yield
    finally:
        path.unlink(missing_ok=True)


def _overwrite(path: Path, content: bytes) -> None:
    # In place and without waiting for the disk: closing it is what shows it to other nodes.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(handle, content, 0)
    finally:
        os.close(handle)


def _machine() -> str:
    """The same in all containers of a machine, which share its locks; another one once it was started anew."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()
