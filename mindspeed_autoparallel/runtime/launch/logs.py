"""The output of a process as a private file, in which what is secret on its command line never stands."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import IO, Any, NamedTuple

from mindspeed_autoparallel.redaction import MASK

_CHUNK = 65536


class Log(NamedTuple):
    """Where a process writes to; close ``stream`` once it has it, and wait for ``copier`` when it has ended."""

    stream: IO[bytes]
    copier: threading.Thread | None


def private_log(path: Path, secrets: frozenset[str]) -> Log:
    """Open ``path`` for a process to write to, readable by the user only and never through a link.

    With ``secrets`` what is given is a pipe, and a thread masks them before they reach the file: a coordinator that is
    killed leaves nothing to be masked afterwards.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    stream = os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
    if not secrets:
        return Log(stream, None)
    reading, writing = os.pipe()
    words = sorted((secret.encode(errors="surrogateescape") for secret in secrets), key=len, reverse=True)
    copier = threading.Thread(target=_copy, args=(reading, stream, words), daemon=True)
    copier.start()
    return Log(os.fdopen(writing, "wb", buffering=0), copier)


def _copy(reading: int, stream: Any, secrets: list[bytes]) -> None:
    """Copy until the last writer closes its end; what may be the beginning of a secret waits for the rest."""
    waiting = b""
    with os.fdopen(reading, "rb", buffering=0) as source, stream:
        while part := source.read(_CHUNK):
            waiting = _masked(waiting + part, secrets)
            kept = _unfinished(waiting, secrets)
            stream.write(waiting[: len(waiting) - kept])
            waiting = waiting[len(waiting) - kept :]
        stream.write(waiting)


def _masked(text: bytes, secrets: list[bytes]) -> bytes:
    # The longest first, for one may be part of another.
    for secret in secrets:
        text = text.replace(secret, MASK.encode())
    return text


def _unfinished(text: bytes, secrets: list[bytes]) -> int:
    """Count how many bytes at the end of ``text`` may begin a secret."""
    longest = max(len(secret) for secret in secrets)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(secret.startswith(text[-length:]) for secret in secrets):
            return length
    return 0
