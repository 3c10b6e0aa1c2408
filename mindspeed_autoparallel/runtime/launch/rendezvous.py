"""Rendezvous of the nodes: a store on the main node, in which every agent signs in."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import LaunchError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.runtime.launch.channel import (
    SECRET_FILE,
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    find_secret,
)
from mindspeed_autoparallel.runtime.launch.processes import LocalRanks
from mindspeed_autoparallel.runtime.launch.store import StoreClient, StoreServer

STORE_ERRORS = (RuntimeError, ConnectionError, TimeoutError)
"""Errors of a store whose other end is gone."""
_POLL_S = 0.2
_TWICE_S = 2.5
"""A node that is alive increments its counter at least once in this time."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a run, and their rendezvous address."""

    num_nodes: int
    num_processes_per_node: int
    master_addr: str
    master_port: int
    secret_dir: Path | None = None
    """Folder in which node 0 stores the secret for nodes that share it, unless the user sets one on all nodes."""

    @property
    def size(self) -> tuple[int, int]:
        """Return nodes and processes per node, which must be the same on every node."""
        return self.num_nodes, self.num_processes_per_node

    def ranks_of(self, node_rank: int, port: int) -> LocalRanks:
        """Return the processes of one node; rank 0 listens at ``port``."""
        return LocalRanks(
            node_rank=node_rank,
            num_processes=self.num_processes_per_node,
            num_nodes=self.num_nodes,
            master_addr=self.master_addr,
            master_port=port,
        )


def serve(nodes: Nodes, secret: bytes) -> StoreServer:
    """Open the store on node 0, and publish the cluster's size."""
    store = StoreServer(nodes.master_addr, nodes.master_port, secret)
    store.set("size", json.dumps(nodes.size))
    return store


def join(nodes: Nodes, node_rank: int, timeout_s: float) -> StoreClient:
    """Connect another node to the store and sign it in; ``LaunchError`` if that fails or is refused."""
    store, size = _connect(nodes, node_rank, timeout_s), nodes.size
    wanted = _size(json.loads(store.get("size")))
    if store.check(["launch/0"]):
        raise LaunchError(
            f"node {node_rank} is too late: node 0 has started. Start the same command on all nodes again."
        )
    signature, heartbeat = f"node/{node_rank}", f"heartbeat/{node_rank}"
    if store.check([signature]):
        count = store.add(heartbeat, 0)
        time.sleep(_TWICE_S)
        if store.add(heartbeat, 0) != count:
            raise LaunchError(
                f"node {node_rank} is already connected: {_about(store.get(signature))}. Give every node a "
                "--node-rank of its own."
            )
    me = {"host": socket.gethostname(), "pid": os.getpid(), "size": size}
    store.set(signature, json.dumps(me))
    if size != wanted:
        store.set(f"dismissed/{node_rank}", "1")
        raise LaunchError(_differ(node_rank, size, wanted))
    return store


def wait_for_nodes(store: StoreServer, cluster: Nodes, timeout_s: float) -> None:
    """Wait until all nodes have signed in; ``LaunchError`` names those that did not, or came with other flags."""
    nodes = range(1, cluster.num_nodes)
    wait_for_keys(store, [f"node/{node}" for node in nodes], timeout_s)
    came = nodes_that_came(store, cluster.num_nodes)
    for node in came:
        other = _size(json.loads(store.get(f"node/{node}")).get("size"))
        if other != cluster.size:
            raise LaunchError(_differ(node, other, cluster.size))
    missing = [node for node in nodes if node not in came]
    if missing:
        raise LaunchError(
            f"{named(missing, cluster.num_nodes)} did not connect to {cluster.master_addr}:{cluster.master_port} "
            f"within {timeout_s:.0f} s. "
            f"Start the same script there with --node-rank {' or '.join(map(str, missing))}, check that the port is "
            "open between the nodes, that --master-addr and --master-port are the same on all, and that nodes which "
            f"share no work dir have the same {SECRET_VARIABLE}."
        )


def nodes_that_came(store: Any, num_nodes: int) -> list[int]:
    """Return the other nodes that signed in."""
    return [node for node in range(1, num_nodes) if store.check([f"node/{node}"])]


def named(nodes: Sequence[int], num_nodes: int) -> str:
    """Return node numbers as text: ``node 1 of 2``, ``nodes 1, 2 of 4``."""
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))} of {num_nodes}"


def wait_for_keys(store: Any, keys: Iterable[str], timeout_s: float) -> None:
    """Wait until all of ``keys`` are set or the time is up."""
    deadline = time.monotonic() + timeout_s
    missing = list(keys)
    while missing := [key for key in missing if not store.check([key])]:
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def _connect(nodes: Nodes, node_rank: int, timeout_s: float) -> StoreClient:
    """Retry until node 0 listens and accepts the secret, which it may not have stored yet; then ``LaunchError``."""
    deadline = time.monotonic() + timeout_s
    while True:
        secret = find_secret(nodes.secret_dir)
        refused = ""
        if secret is None:
            where = f"no {SECRET_FILE} in {nodes.secret_dir}" if nodes.secret_dir else f"{SECRET_VARIABLE} is not set"
            refused = f"it has no secret: {where}"
        else:
            try:
                return StoreClient(nodes.master_addr, nodes.master_port, secret)
            except PermissionError as error:
                refused = str(error)
            except (OSError, ValueError):
                pass
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    where = f"{nodes.master_addr}:{nodes.master_port} within {timeout_s:.0f} s"
    if refused:
        raise LaunchError(
            f"node {node_rank} was rejected by the main node at {where}: {refused}. Nodes that share no work dir need "
            f"one secret in {SECRET_VARIABLE} on all of them (openssl rand -hex 32), or a file of it in "
            f"{SECRET_FILE_VARIABLE}."
        )
    raise LaunchError(
        f"node {node_rank} cannot reach the main node at {where}. "
        "Start the script with --node-rank 0 there, and check --master-addr, --master-port and the firewall."
    )


def _size(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int and 0 < one < 2**20 for one in value):
        raise LaunchError(f"a node reports that the cluster has the size {shown(value)}.")
    return value[0], value[1]


def _about(signature: bytes) -> str:
    other = json.loads(signature)
    host, pid = (other.get(name) for name in ("host", "pid")) if isinstance(other, dict) else ("?", 0)
    return f"process {pid if type(pid) is int else 0} on {shown(str(host))}"


def _differ(node: int, its: tuple[int, int], wanted: tuple[int, int]) -> str:
    own, first = (f"--nnodes {nodes} --nproc-per-node {processes}" for nodes, processes in (its, wanted))
    return f"node {node} was started with {own}, node 0 with {first}: give the same on all nodes."
