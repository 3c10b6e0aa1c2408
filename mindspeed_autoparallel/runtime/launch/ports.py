"""Ports for the processes of a launch."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from mindspeed_autoparallel.errors import ConfigError

_LAST_PORT = 65535


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a TCP port of this machine that the system gives to nobody else within the context.

    Between a choice and its use lie the seconds in which a process loads torch; another job's connection may take the
    port meanwhile, and rank 1 then waits for a store that is not its own. A socket bound and never listening keeps
    the port; whoever is told of it can still listen there, since stores (libuv, torchrun, gloo) set SO_REUSEADDR.
    """
    with _reusing_socket() as holder:
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


def check_port_is_free(port: int) -> None:
    """Raise ``ConfigError`` when ``port`` is none, or something already listens on it on this machine."""
    if not 0 < port <= _LAST_PORT:
        raise ConfigError(
            f"--master-port {port} is no port: choose one from 1024 to {_LAST_PORT}, the same on every node."
        )
    with _reusing_socket() as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"--master-port {port} cannot be used on this node: {error.strerror}. "
                "Choose another port, the same on every node, or end the process that holds it."
            ) from error


def _reusing_socket() -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return one
