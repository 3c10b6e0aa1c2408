"""One tuning run per work dir: the second says who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError

LOCK_FILE = ".lock"


@contextlib.contextmanager
def only_one(work_dir: Path) -> Iterator[None]:
    """Hold ``work_dir`` until the context ends; the system lets go of it when the process dies, however it does."""
    path = work_dir / LOCK_FILE
    with path.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            stream.seek(0)
            raise ConfigError(
                f"another tuning run is at work in {work_dir} ({stream.read().strip() or 'unknown'}). Wait for it, end "
                "it, or choose another --auto-tuning-work-dir."
            ) from error
        stream.truncate(0)
        stream.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        stream.flush()
        yield
