"""How the nodes find one another: a store on the main node, in which every agent signs in."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from mindspeed_autoparallel.errors import LaunchError

STORE_ERRORS = (RuntimeError, ConnectionError, TimeoutError)
"""What a TCPStore raises when its other end is gone."""
_POLL_S = 0.2
_TWICE_S = 2.5
"""A node that is there counts up at least once in this time."""


class ClusterSize(NamedTuple):
    """What has to be the same on every node."""

    num_nodes: int
    num_processes_per_node: int

    def flags(self) -> str:
        """As a user wrote it."""
        return f"--nnodes {self.num_nodes} --nproc-per-node {self.num_processes_per_node}"


def serve(master_addr: str, master_port: int, size: ClusterSize) -> Any:
    """The store, on the main node."""
    from torch.distributed import TCPStore

    store = TCPStore(master_addr, master_port, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)
    store.set("size", json.dumps(size))
    return store


def join(master_addr: str, master_port: int, node_rank: int, size: ClusterSize, timeout_s: float) -> Any:
    """The store, on another node, which has signed in; ``LaunchError`` where it cannot or must not."""
    from torch.distributed import TCPStore

    try:
        store = TCPStore(master_addr, master_port, None, False, timeout=timedelta(seconds=timeout_s))
        wanted = ClusterSize(*json.loads(store.get("size")))
    except STORE_ERRORS as error:
        raise LaunchError(
            f"node {node_rank} cannot reach the main node at {master_addr}:{master_port} within {timeout_s:.0f} s. "
            "Start the script with --node-rank 0 there, and check --master-addr, --master-port and the firewall."
        ) from error
    if store.check(["launch/0"]):
        raise LaunchError(
            f"node {node_rank} comes too late: node 0 has begun. Start the same command on all nodes again."
        )
    signature, beats = f"node/{node_rank}", f"beats/{node_rank}"
    if store.check([signature]):
        count = store.add(beats, 0)
        time.sleep(_TWICE_S)
        if store.add(beats, 0) != count:
            other = json.loads(store.get(signature))
            raise LaunchError(
                f"node {node_rank} is there already: process {other['pid']} on {other['host']}. Give every node a "
                "--node-rank of its own."
            )
    me = {"host": socket.gethostname(), "pid": os.getpid(), "size": size}
    store.set(signature, json.dumps(me))
    if size != wanted:
        store.set(f"dismissed/{node_rank}", "1")
        raise LaunchError(_differ(node_rank, size, wanted))
    return store


def wait_for_nodes(store: Any, size: ClusterSize, master_addr: str, master_port: int, timeout_s: float) -> None:
    """Until all nodes have signed in; ``LaunchError`` names those that did not, or came with other flags."""
    nodes = range(1, size.num_nodes)
    wait_for_keys(store, [f"node/{node}" for node in nodes], timeout_s)
    came = nodes_that_came(store, size.num_nodes)
    for node in came:
        other = ClusterSize(*json.loads(store.get(f"node/{node}"))["size"])
        if other != size:
            raise LaunchError(_differ(node, other, size))
    missing = [node for node in nodes if node not in came]
    if missing:
        raise LaunchError(
            f"{named(missing, size.num_nodes)} did not come to {master_addr}:{master_port} within {timeout_s:.0f} s. "
            f"Start the same script there with --node-rank {' or '.join(map(str, missing))}, check that the port is "
            "open between the nodes, and that --master-addr and --master-port are the same on all."
        )


def nodes_that_came(store: Any, num_nodes: int) -> list[int]:
    """Other nodes that signed in."""
    return [node for node in range(1, num_nodes) if store.check([f"node/{node}"])]


def named(nodes: Sequence[int], num_nodes: int) -> str:
    """For people: ``node 1 of 2``, ``nodes 1, 2 of 4``."""
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))} of {num_nodes}"


def wait_for_keys(store: Any, keys: Iterable[str], timeout_s: float) -> None:
    """Until all of ``keys`` are set or the time is up."""
    deadline = time.monotonic() + timeout_s
    missing = list(keys)
    while missing := [key for key in missing if not store.check([key])]:
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def _differ(node: int, its: ClusterSize, wanted: ClusterSize) -> str:
    return f"node {node} was started with {its.flags()}, node 0 with {wanted.flags()}: give the same on all nodes."
