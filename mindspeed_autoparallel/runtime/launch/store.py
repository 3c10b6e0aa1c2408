"""The store in which the nodes meet: a table of small values on node 0 that only nodes with the secret can reach.

torch's TCPStore listens on every interface and answers whoever reaches the port, torch's elastic agent meets in it, and
etcd is a service of its own. This one listens at one address, says nothing to a client before that has proved that it
knows the secret, and signs every message with a key of the connection (docs/security.md).
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
import threading
import time
from collections.abc import Sequence
from typing import Any

from mindspeed_autoparallel.errors import ConfigError

LISTEN_VARIABLE = "MINDSPEED_AUTOPARALLEL_LISTEN"
"""The address node 0 listens at, where ``--master-addr`` is one that only the others know (NAT)."""
_HELLO = b"mindspeed-autoparallel store 1\n"
_NONCE, _DIGEST = 32, 32
_LONGEST = 4 * 1024**2
_HELLO_S = 5.0
"""A client that has not proved itself in this time is dropped."""
_MOST_UNKNOWN = 64
_POLL_S = 0.2


class LocalStore:
    """The table itself, as node 0 uses it; the methods are those of torch's stores."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        """Keep ``value`` under ``key``."""
        with self._lock:
            self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """Return the value of ``key``; ``KeyError`` where there is none."""
        with self._lock:
            return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of ``keys`` have a value."""
        with self._lock:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Count ``key`` up by ``amount``; returns the count."""
        with self._lock:
            count = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(count).encode()
            return count


class StoreServer(LocalStore):
    """``LocalStore`` that answers clients with the secret at ``address``:``port`` until it is closed."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        super().__init__()
        self._secret = secret
        self._unknown = threading.Semaphore(_MOST_UNKNOWN)
        self._socket = _listen(address, port)
        threading.Thread(target=self._accept, name="store", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            if not self._unknown.acquire(blocking=False):
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), client:
            try:
                channel = _welcome(client, self._secret)
            finally:
                self._unknown.release()
            while True:
                channel.send(self._answer(channel.receive()))

    def _answer(self, order: Any) -> dict[str, Any]:
        name, key = order["op"], order["key"]
        if name == "set":
            self.set(str(key), str(order["value"]))
            return {}
        if name == "get":
            return {"value": self.get(key).decode() if self.check([key]) else None}
        if name == "check":
            return {"value": self.check([str(one) for one in key])}
        if name == "add":
            return {"value": self.add(str(key), int(order["value"]))}
        raise ValueError(f"no operation {name!r}")


class StoreClient:
    """Another node's side; raises ``ConnectionError`` once node 0 is gone."""

    def __init__(self, address: str, port: int, secret: bytes, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        connection = socket.create_connection((address, port), timeout=_HELLO_S)
        try:
            self._channel = _introduce(connection, secret)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(timeout_s)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        """Keep ``value`` under ``key`` on node 0."""
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait up to ``timeout_s`` for the value of ``key``; ``TimeoutError`` then."""
        deadline = time.monotonic() + self._timeout_s
        while (value := self._ask("get", key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"node 0 has not set {key} within {self._timeout_s:.0f} s")
            time.sleep(_POLL_S)
        return str(value).encode()

    def check(self, keys: Sequence[str]) -> bool:
        """Ask node 0 whether all of ``keys`` have a value."""
        return bool(self._ask("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Count ``key`` up on node 0."""
        return int(self._ask("add", key, amount))

    def _ask(self, operation: str, key: Any, value: Any = None) -> Any:
        try:
            with self._lock:
                self._channel.send({"op": operation, "key": key, "value": value})
                return self._channel.receive().get("value")
        except (OSError, ValueError) as error:
            raise ConnectionError(str(error) or type(error).__name__) from error


class _Channel:
    """Messages in both directions, each signed with its number, so that none can be changed, repeated or left out."""

    def __init__(self, connection: socket.socket, key: bytes, mine: bytes, theirs: bytes) -> None:
        self._connection, self._key = connection, key
        self._mine, self._theirs = mine, theirs
        self._sent = self._received = 0

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode()
        if len(body) > _LONGEST:
            raise ValueError(f"a message of {len(body)} bytes is longer than {_LONGEST}")
        signature = self._sign(self._mine, self._sent, body)
        self._sent += 1
        self._connection.sendall(struct.pack(">I", len(body)) + signature + body)

    def receive(self) -> Any:
        length = struct.unpack(">I", _read(self._connection, 4))[0]
        if length > _LONGEST:
            raise ValueError(f"a message of {length} bytes is longer than {_LONGEST}")
        signature = _read(self._connection, _DIGEST)
        body = _read(self._connection, length)
        if not hmac.compare_digest(signature, self._sign(self._theirs, self._received, body)):
            raise ValueError("a message is not signed by the other node")
        self._received += 1
        return json.loads(body)

    def _sign(self, direction: bytes, number: int, body: bytes) -> bytes:
        return _digest(self._key, direction + struct.pack(">Q", number) + body)


def _introduce(connection: socket.socket, secret: bytes) -> _Channel:
    """Do the client's half of the handshake: it proves itself first; ``PermissionError`` where secrets differ."""
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(_HELLO + mine + _digest(secret, b"client" + mine))
    try:
        theirs, proof = _read(connection, _NONCE), _read(connection, _DIGEST)
    except OSError as error:
        raise PermissionError("node 0 does not accept this node's secret") from error
    if not hmac.compare_digest(proof, _digest(secret, b"server" + mine + theirs)):
        raise PermissionError("what answers there does not know the secret of the nodes")
    return _Channel(connection, _digest(secret, b"session" + mine + theirs), b"c", b"s")


def _welcome(client: socket.socket, secret: bytes) -> _Channel:
    """Do the server's half: not a byte is sent to a client that has not proved itself."""
    client.settimeout(_HELLO_S)
    deadline = time.monotonic() + _HELLO_S
    hello = b""
    while len(hello) < len(_HELLO) + _NONCE + _DIGEST:
        part = client.recv(len(_HELLO) + _NONCE + _DIGEST - len(hello))
        if not part or time.monotonic() > deadline:
            raise ConnectionError("the client has not introduced itself")
        hello += part
    theirs, proof = hello[len(_HELLO) : -_DIGEST], hello[-_DIGEST:]
    if not hello.startswith(_HELLO) or not hmac.compare_digest(proof, _digest(secret, b"client" + theirs)):
        raise PermissionError("the client does not know the secret")
    mine = secrets.token_bytes(_NONCE)
    client.sendall(mine + _digest(secret, b"server" + theirs + mine))
    client.settimeout(None)
    return _Channel(client, _digest(secret, b"session" + theirs + mine), b"s", b"c")


def _digest(key: bytes, content: bytes) -> bytes:
    return hmac.new(key, content, hashlib.sha256).digest()


def _read(connection: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        part = connection.recv(min(65536, length - len(content)))
        if not part:
            raise ConnectionError("the other end is gone")
        content += part
    return content


def _listen(address: str, port: int) -> socket.socket:
    """Open a listening socket at ``address``; ``ConfigError`` where that is no address of this machine, or in use."""
    host = os.environ.get(LISTEN_VARIABLE) or address
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        one = socket.socket(family, kind, protocol)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(place)
        one.listen(128)
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen at {host}:{port}: {error.strerror or error}. Give an address of this machine with "
            f"--master-addr (where the others know it by another, name its own in {LISTEN_VARIABLE}), and a free port."
        ) from error
    return one
