"""The rendezvous store: a table of small values on node 0 that only nodes with the secret can reach.

torch's TCPStore, which torch's elastic agent uses, listens on every interface and serves any client, and etcd is a
separate service. This one listens at one address and serves only clients that prove that they have the secret; every
message is signed with a key of the connection (channel.py, docs/security.md).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.launch.channel import HANDSHAKE_S, introduce, welcome

LISTEN_VARIABLE = "MINDSPEED_AUTOPARALLEL_LISTEN"
"""The address at which node 0 listens, if ``--master-addr`` is valid only on the other nodes (NAT)."""
_MOST_UNKNOWN = 32
"""Most clients with a handshake in progress; one more drops the oldest, because a node needs only milliseconds."""
_WAITS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EAGAIN, errno.EINTR)
"""Errors after which the same listening socket can accept again."""
_WAIT_S = 0.05
_POLL_S = 0.2


class StoreServer:
    """The table, used directly on node 0 by the methods of torch's stores, and served to clients with the secret at
    ``address``:``port`` until it is closed."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._secret = secret
        self._unknown: dict[socket.socket, None] = {}
        """Connections with a handshake in progress, the oldest first."""
        self._unknown_lock = threading.Lock()
        self._socket = _listen(address, port)
        threading.Thread(target=self._accept, name="store", daemon=True).start()

    def set(self, key: str, value: str | bytes) -> None:
        """Keep ``value`` under ``key``."""
        with self._lock:
            self._values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """Return the value of ``key``; ``KeyError`` if it is missing."""
        with self._lock:
            return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of ``keys`` have a value."""
        with self._lock:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Increment ``key`` by ``amount``; return the count."""
        with self._lock:
            count = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(count).encode()
            return count

    def close(self) -> None:
        """Stop listening; open connections remain."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in _WAITS:
                    return
                self._drop_oldest_unknown()
                time.sleep(_WAIT_S)
                continue
            if len(self._unknown) >= _MOST_UNKNOWN:
                self._drop_oldest_unknown()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with self._unknown_lock:
                self._unknown[client] = None
            try:
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()
            except RuntimeError:  # no thread available
                self._forget(client)
                client.close()

    def _drop_oldest_unknown(self) -> None:
        with self._unknown_lock:
            if self._unknown:
                oldest = next(iter(self._unknown))
                del self._unknown[oldest]
                with contextlib.suppress(OSError):  # its thread sees the end of the stream and closes it
                    oldest.shutdown(socket.SHUT_RDWR)

    def _forget(self, client: socket.socket) -> None:
        with self._unknown_lock:
            self._unknown.pop(client, None)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), client:
            try:
                channel = welcome(client, self._secret, lambda: self._forget(client))
            finally:
                self._forget(client)
            while True:
                channel.send(self._answer(channel.receive()))

    def _answer(self, order: Any) -> dict[str, object]:
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
    """The client side on another node; raises ``ConnectionError`` once node 0 is gone."""

    def __init__(self, address: str, port: int, secret: bytes, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        connection = socket.create_connection((address, port), timeout=HANDSHAKE_S)
        try:
            self._channel = introduce(connection, secret)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(timeout_s)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        """Keep ``value`` under ``key`` on node 0."""
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """Wait up to ``timeout_s`` for the value of ``key``; ``TimeoutError`` after that."""
        deadline = time.monotonic() + self._timeout_s
        while (value := self._ask("get", key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"node 0 has not set {key} within {self._timeout_s:.0f} s")
            time.sleep(_POLL_S)
        return str(value).encode()

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of ``keys`` have a value on node 0."""
        return bool(self._ask("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Increment ``key`` on node 0."""
        return int(self._ask("add", key, amount))

    def _ask(self, operation: str, key: Any, value: Any = None) -> Any:
        try:
            with self._lock:
                self._channel.send({"op": operation, "key": key, "value": value})
                return self._channel.receive().get("value")
        except (OSError, ValueError) as error:
            raise ConnectionError(str(error) or type(error).__name__) from error


def _listen(address: str, port: int) -> socket.socket:
    """Open a listening socket at ``address``; ``ConfigError`` if that is not an address of this machine, or in use."""
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
            f"--master-addr (if other nodes use another, set the local one in {LISTEN_VARIABLE}), and a free port."
        ) from error
    return one
