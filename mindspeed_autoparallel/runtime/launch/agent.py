"""The agent of every node but the first: runs node 0's orders until node 0 dismisses it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import LaunchError, first_line
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.runtime.launch import rendezvous
from mindspeed_autoparallel.runtime.launch.liveness import Heartbeat
from mindspeed_autoparallel.runtime.launch.orders import own_command, read_order
from mindspeed_autoparallel.runtime.launch.outcome import LaunchStatus
from mindspeed_autoparallel.runtime.launch.processes import run_local_processes
from mindspeed_autoparallel.runtime.launch.store import StoreClient

JOIN_TIMEOUT_S = 600.0
_POLL_S = 0.2


def run_agent(
    nodes: rendezvous.Nodes,
    *,
    node_rank: int,
    log_dir: Path,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    flags: Collection[str] = (),
    command: Sequence[str] | None = None,
) -> int:
    """Run the coordinator's orders on node ``node_rank`` until dismissed; return the number of launches.

    An order always runs ``command`` (default: this process's script), with its own words and ``flags`` (orders.py).
    """
    store = rendezvous.join(nodes, node_rank, join_timeout_s)
    agent = _Agent(nodes, node_rank, log_dir, store, Heartbeat(store, node_rank))
    own = tuple(command or own_command())
    try:
        number = 0
        while (order := agent.next_order(number)) is not None:
            agent.obey(number, order, own, flags)
            number += 1
        return number
    except rendezvous.STORE_ERRORS as error:
        raise LaunchError(
            f"node {node_rank} lost the main node {nodes.master_addr}:{nodes.master_port}: "
            f"{first_line(error)}. Look at the output on node 0."
        ) from error
    except BaseException as error:
        with contextlib.suppress(Exception):
            agent.heartbeat.leave(str(error) or type(error).__name__)
        raise


@dataclass(frozen=True)
class _Agent:
    """A node that has signed in."""

    nodes: rendezvous.Nodes
    node_rank: int
    log_dir: Path
    store: StoreClient
    heartbeat: Heartbeat

    def next_order(self, number: int) -> Any:
        """Wait for launch ``number``; None once node 0 is done, ``LaunchError`` if it gives a reason for its end."""
        key = f"launch/{number}"
        while not self.store.check([key]):
            self.heartbeat.beat()
            time.sleep(_POLL_S)
        order = json.loads(self.store.get(key))
        if not (isinstance(order, dict) and order.get("stop")):
            return order
        self.store.set(f"dismissed/{self.node_rank}", "1")
        if order.get("reason"):
            reason = shown(str(order["reason"]), 300)
            raise LaunchError(f"node {self.node_rank} ends because node 0 did: {reason}")
        return None

    def obey(self, number: int, order: Any, own: Sequence[str], flags: Collection[str]) -> None:
        """Run ``order`` and report its outcome."""
        aborted = f"abort/{number}"

        def should_stop() -> bool:
            self.heartbeat.beat()
            return self.store.check([aborted])

        spec, worker_port = read_order(order, own, flags)
        outcome = run_local_processes(
            spec,
            self.nodes.ranks_of(self.node_rank, worker_port),
            log_dir=self.log_dir,
            should_stop=should_stop,
        )
        if outcome.status is not LaunchStatus.OK:
            self.store.set(aborted, "1")
        self.store.set(f"outcome/{number}/{self.node_rank}", json.dumps(outcome.to_json()))
