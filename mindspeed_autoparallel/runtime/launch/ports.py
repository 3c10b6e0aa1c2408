"""Ports and torch's stores for the processes of a launch, and the rendezvous store for torchrun's nodes."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

from mindspeed_autoparallel.errors import ConfigError, first_line
from mindspeed_autoparallel.interrupts import LONGEST_WAIT_S

_LAST_PORT = 65535


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a TCP port of this machine that the system assigns to no other process within the context.

    A process loads torch for seconds before it uses the port; another job's connection may take the port meanwhile, and
    rank 1 then waits for a foreign store. A socket that is bound but never listens reserves the port; a process with
    its number can still listen there, because stores (libuv, torchrun, gloo) set SO_REUSEADDR.
    """
    with _reusing_socket() as holder:
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def loopback_store() -> Iterator[int]:
    """Serve the ``TCPStore`` of one node's ranks at the loopback address; yield its port.

    A store that rank 0 opens listens on every interface and serves any client. This one listens on a socket of the
    loopback address only, and all ranks are its clients, as under torchrun (``LOOPBACK_ENVIRONMENT``).
    """
    from torch.distributed import TCPStore

    listening = socket.create_server((LOOPBACK, 0), backlog=128)
    port = int(listening.getsockname()[1])
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    try:
        yield port
    finally:
        del store  # closes its socket


LOOPBACK_ENVIRONMENT = {
    "MASTER_ADDR": LOOPBACK,
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",  # torch up to 2.4 reads this one, too
}
"""Variables that make torch's ``env://`` a client of ``loopback_store``."""


def gloo_on_loopback() -> dict[str, str]:
    """Return variables with which gloo listens at the loopback address; none if the system lists no such interface."""
    with contextlib.suppress(OSError, AttributeError):
        names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}
    return {}


def check_port_is_free(port: int) -> None:
    """Raise ``ConfigError`` if ``port`` is invalid, or in use on this machine."""
    if not 0 < port <= _LAST_PORT:
        raise ConfigError(
            f"--master-port {port} is not a port: choose one from 1024 to {_LAST_PORT}, the same on every node."
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


def serve_elastic(address: str, port: int) -> None:
    """Serve ``torchrun --rdzv-backend c10d --rdzv-conf is_host=0`` at ``address``:``port`` until the process is ended.

    Raises ``ConfigError`` if it cannot listen there.
    """
    if not 0 < port < 65536:
        raise ConfigError(f"--port must be 1 to 65535, got {port}.")
    from torch.distributed import TCPStore

    try:
        store = TCPStore(address, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen at {address}:{port}: {first_line(error)}. Choose another --port.") from error
    print(
        f"rendezvous at port {store.port}: start torchrun on every node with --rdzv-backend c10d --rdzv-endpoint "
        f"THIS_MACHINE:{store.port} --rdzv-conf is_host=0",
        flush=True,
    )
    while True:
        time.sleep(LONGEST_WAIT_S)
