"""The secret that the nodes of one run share: made by node 0, or given to all of them."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_text

SECRET_VARIABLE = "MINDSPEED_AUTOPARALLEL_SECRET"
SECRET_FILE_VARIABLE = "MINDSPEED_AUTOPARALLEL_SECRET_FILE"
FILE = ".cluster-secret"
"""In the work dir, where all nodes share it; readable by the user only, and gone when the run ends."""
_LEAST_LENGTH = 16


def given_secret() -> bytes | None:
    """Read the secret that one of the two variables gives; ``ConfigError`` where it is short or unreadable."""
    text = os.environ.get(SECRET_VARIABLE)
    where = SECRET_VARIABLE
    if text is None and os.environ.get(SECRET_FILE_VARIABLE):
        where = os.environ[SECRET_FILE_VARIABLE]
        path = Path(where)
        text = read_text(path, "secret of the nodes", max_bytes=4096)
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path} can be read by others: chmod 600 it, and give the nodes a new secret.")
    if text is None:
        return None
    if len(text.strip()) < _LEAST_LENGTH:
        raise ConfigError(
            f"the secret in {where} has fewer than {_LEAST_LENGTH} characters; make one: openssl rand -hex 32"
        )
    return text.strip().encode()


def make_secret(folder: Path | None) -> bytes:
    """Take, on node 0, what the user gave, else make a secret, which is left in ``folder`` for nodes that share it."""
    given = given_secret()
    if given is not None or folder is None:
        return given if given is not None else secrets.token_hex(32).encode()
    made = secrets.token_hex(32)
    path = folder / FILE
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # an earlier run's, or a link that somebody put there
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii") as stream:
            stream.write(made)
    except OSError as error:
        raise ConfigError(f"cannot leave the secret of the nodes in {path}: {error.strerror or error}.") from error
    return made.encode()


def find_secret(folder: Path | None) -> bytes | None:
    """Find, on another node, what the user gave, else what node 0 left in ``folder`` by now."""
    given = given_secret()
    if given is not None or folder is None:
        return given
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(folder / FILE, flags), "r", encoding="ascii") as stream:
            return stream.read(4096).strip().encode() or None
    return None


def remove_secret(folder: Path | None) -> None:
    """Remove what the run left in ``folder``: it opens nothing any more."""
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / FILE).unlink()
