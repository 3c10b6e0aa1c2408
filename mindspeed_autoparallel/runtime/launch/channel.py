"""The secret that the nodes of a run share, and connections that prove it: a mutual challenge, then signed messages.

The client sends a greeting and a nonce, the server answers with its own nonce, and both prove with an HMAC over the two
nonces that they have the secret. A recorded handshake is useless: the server's nonce is new every time. The
standard library's ``multiprocessing.connection`` has the same challenge, without a deadline and without signatures on
later messages (docs/decisions/0016).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_text

SECRET_VARIABLE = "MINDSPEED_AUTOPARALLEL_SECRET"
SECRET_FILE_VARIABLE = "MINDSPEED_AUTOPARALLEL_SECRET_FILE"
SECRET_FILE = ".cluster-secret"
"""File in the work dir, for nodes that share it; readable by the user only, and removed when the run ends."""
_LEAST_LENGTH = 16

GREETING = b"mindspeed-autoparallel store 2\n"
HANDSHAKE_S = 5.0
"""A client that has not proved itself in this time is dropped."""
NONCE_BYTES, DIGEST_BYTES = 32, 32
_LONGEST = 4 * 1024**2


def given_secret() -> bytes | None:
    """Read the secret from one of the two variables; ``ConfigError`` if it is short, unreadable, or open to others."""
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
    """Return the user's secret on node 0, or generate one and store it in ``folder`` for nodes that share it."""
    given = given_secret()
    if given is not None or folder is None:
        return given if given is not None else secrets.token_hex(32).encode()
    made = secrets.token_hex(32)
    path = folder / SECRET_FILE
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # from an earlier run, or a link placed by another user
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii") as stream:
            stream.write(made)
    except OSError as error:
        raise ConfigError(f"cannot write the secret of the nodes to {path}: {error.strerror or error}.") from error
    return made.encode()


def find_secret(folder: Path | None) -> bytes | None:
    """Return the user's secret on another node, or node 0's in ``folder``; None if neither exists yet."""
    given = given_secret()
    if given is not None or folder is None:
        return given
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(folder / SECRET_FILE, flags), "r", encoding="ascii") as stream:
            return stream.read(4096).strip().encode() or None
    return None


def remove_secret(folder: Path | None) -> None:
    """Remove the run's secret from ``folder``: it is no longer valid."""
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / SECRET_FILE).unlink()


class Channel:
    """Messages in both directions, each signed with its number: none can be changed, repeated or dropped."""

    def __init__(self, connection: socket.socket, key: bytes, mine: bytes, theirs: bytes) -> None:
        self._connection, self._key = connection, key
        self._mine, self._theirs = mine, theirs
        self._sent = self._received = 0

    def send(self, message: Any) -> None:
        """Sign and send a JSON value of at most 4 MiB."""
        body = json.dumps(message).encode()
        if len(body) > _LONGEST:
            raise ValueError(f"a message of {len(body)} bytes is longer than {_LONGEST}")
        signature = self._sign(self._mine, self._sent, body)
        self._sent += 1
        self._connection.sendall(struct.pack(">I", len(body)) + signature + body)

    def receive(self) -> Any:
        """Wait for the next message; ``ValueError`` if it is too long or its signature is wrong."""
        length = struct.unpack(">I", _read(self._connection, 4))[0]
        if length > _LONGEST:
            raise ValueError(f"a message of {length} bytes is longer than {_LONGEST}")
        signature = _read(self._connection, DIGEST_BYTES)
        body = _read(self._connection, length)
        if not hmac.compare_digest(signature, self._sign(self._theirs, self._received, body)):
            raise ValueError("a message is not signed by the other node")
        self._received += 1
        return json.loads(body)

    def _sign(self, direction: bytes, number: int, body: bytes) -> bytes:
        return digest(self._key, direction + struct.pack(">Q", number) + body)


def introduce(connection: socket.socket, secret: bytes) -> Channel:
    """Perform the client's half of the handshake; ``PermissionError`` if the secrets differ."""
    deadline = time.monotonic() + HANDSHAKE_S
    mine = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(GREETING + mine)
    try:
        theirs = _read(connection, NONCE_BYTES, deadline)
        connection.sendall(digest(secret, b"client" + mine + theirs))
        proof = _read(connection, DIGEST_BYTES, deadline)
    except OSError as error:
        raise PermissionError("node 0 does not accept this node's secret") from error
    if not hmac.compare_digest(proof, digest(secret, b"server" + mine + theirs)):
        raise PermissionError("the program that answers there does not have the secret of the nodes")
    return Channel(connection, digest(secret, b"session" + mine + theirs), b"c", b"s")


def welcome(client: socket.socket, secret: bytes, proved: Callable[[], None]) -> Channel:
    """Perform the server's half; ``PermissionError`` if the greeting or the proof is wrong.

    A client without the greeting receives nothing, and one without the secret only a nonce. ``proved`` is called once
    the client has proved itself, before the server sends its acceptance.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    greeting = b""
    while len(greeting) < len(GREETING):
        greeting += _read(client, 1, deadline)
        if not GREETING.startswith(greeting):
            raise PermissionError("the client does not speak this protocol")
    theirs, mine = _read(client, NONCE_BYTES, deadline), secrets.token_bytes(NONCE_BYTES)
    client.sendall(mine)
    proof = _read(client, DIGEST_BYTES, deadline)
    if not hmac.compare_digest(proof, digest(secret, b"client" + theirs + mine)):
        raise PermissionError("the client does not have the secret")
    proved()
    client.sendall(digest(secret, b"server" + theirs + mine))
    client.settimeout(None)
    return Channel(client, digest(secret, b"session" + theirs + mine), b"s", b"c")


def digest(key: bytes, content: bytes) -> bytes:
    """Return the HMAC-SHA256 of ``content``, 32 bytes."""
    return hmac.new(key, content, hashlib.sha256).digest()


def _read(connection: socket.socket, length: int, deadline: float | None = None) -> bytes:
    """Read ``length`` bytes; ``OSError`` if the other end hangs up, or ``deadline`` (monotonic) passes first."""
    content = b""
    while len(content) < length:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        part = connection.recv(min(65536, length - len(content)))
        if not part:
            raise ConnectionError("the connection is closed")
        content += part
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError("the handshake timed out")
    return content
