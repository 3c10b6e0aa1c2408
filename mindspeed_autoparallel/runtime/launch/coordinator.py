"""The coordinator on node 0, which starts every launch. The other nodes run agents that execute its orders and report.

They communicate through a store on node 0, which requires the run's secret; no shared file system is needed.
"""

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
from mindspeed_autoparallel.profiles.records import json_of
from mindspeed_autoparallel.runtime.launch import liveness, rendezvous
from mindspeed_autoparallel.runtime.launch.channel import make_secret, remove_secret
from mindspeed_autoparallel.runtime.launch.liveness import Heartbeat, Watch
from mindspeed_autoparallel.runtime.launch.orders import order_of, own_command, read_order, read_outcome
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchSpec, LaunchStatus, worst
from mindspeed_autoparallel.runtime.launch.ports import check_port_is_free, reserved_port
from mindspeed_autoparallel.runtime.launch.processes import run_local_processes
from mindspeed_autoparallel.runtime.launch.store import StoreClient, StoreServer

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

    Every order runs ``command`` (default: this process's script) with words of that command, ``flags`` and plain values
    (orders.py). Raises ``LaunchError`` if node 0 refuses the node, is lost, gives an invalid order, or itself fails.
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
        """Wait for the order of launch ``number``; None once node 0 has finished, ``LaunchError`` if it failed."""
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
            spec, self.nodes.ranks_of(self.node_rank, worker_port), log_dir=self.log_dir, should_stop=should_stop
        )
        if outcome.status is not LaunchStatus.OK:
            self.store.set(aborted, "1")
        self.store.set(f"outcome/{number}/{self.node_rank}", json.dumps(json_of(outcome)))


_SHUTDOWN_S = 15.0
"""An agent may be ending processes, which takes up to 10 s."""


class Coordinator:
    """Node 0's side. Use it as a context manager, which dismisses the agents on exit."""

    def __init__(
        self,
        nodes: rendezvous.Nodes,
        *,
        log_dir: Path,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        silence_s: float | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self.nodes = nodes
        self.log_dir = log_dir
        self.join_timeout_s = join_timeout_s
        self.silence_s = liveness.SILENCE_S if silence_s is None else silence_s
        self.command = tuple(command or own_command())
        self._store: StoreServer | None = None
        self._watch: Watch | None = None
        self._lost: list[int] = []
        self._num_launches = 0

    def __enter__(self) -> Coordinator:
        if self.nodes.num_nodes > 1:
            check_port_is_free(self.nodes.master_port)
            self._store = rendezvous.serve(self.nodes, make_secret(self.nodes.secret_dir))
            try:
                rendezvous.wait_for_nodes(self._store, self.nodes, self.join_timeout_s)
            except BaseException as error:
                self._shutdown_agents(error)
                raise
            self._watch = Watch(self._store, range(1, self.nodes.num_nodes), self.silence_s)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._shutdown_agents(error)

    @property
    def lost_nodes(self) -> tuple[int, ...]:
        """Return the nodes that no longer respond; nothing can be launched without them."""
        return tuple(self._lost)

    def _shutdown_agents(self, error: BaseException | None) -> None:
        if self._store is None:
            return
        with contextlib.suppress(Exception):  # the other nodes may already be gone
            reason = "it was interrupted" if isinstance(error, KeyboardInterrupt) else str(error or "")
            word = {"stop": True, "reason": reason}
            self._store.set(f"launch/{self._num_launches}", json.dumps(word))
            # The store ends with this process: first let the agents end their processes and read the dismissal.
            gone = [*self._lost, *(() if self._watch is None else self._watch.gone())]
            there = [node for node in rendezvous.nodes_that_came(self._store, self.nodes.num_nodes) if node not in gone]
            rendezvous.wait_for_keys(self._store, [f"dismissed/{node}" for node in there], _SHUTDOWN_S)
        self._store.close()
        remove_secret(self.nodes.secret_dir)
        self._store = None

    def launch(self, spec: LaunchSpec) -> LaunchOutcome:
        """Run ``spec`` on every node and return its outcome; a failed launch raises no exception."""
        if self._lost:
            return self._without_nodes(LaunchStatus.NOT_STARTED)
        number = self._num_launches
        self._num_launches += 1
        aborted = f"abort/{number}"
        try:
            # The ranks of a single node use a store on the loopback address, which chooses its own port.
            with contextlib.nullcontext(0) if self._store is None else reserved_port() as worker_port:
                if self._store is not None:
                    self._store.set(f"launch/{number}", json.dumps(order_of(spec, worker_port, self.command)))
                if self._watch is not None:
                    self._watch.begin()
                outcome = run_local_processes(
                    spec,
                    self.nodes.ranks_of(0, worker_port),
                    log_dir=self.log_dir,
                    should_stop=lambda: (
                        self._watch is not None
                        and self._store is not None
                        and (self._store.check([aborted]) or bool(self._watch.gone()))
                    ),
                )
        except BaseException:
            if self._store is not None:
                self._store.set(aborted, "1")
            raise
        if self._watch is None or self._store is None:
            return outcome
        if outcome.status is not LaunchStatus.OK:
            self._store.set(aborted, "1")
        reports = {
            node: self._report(number, node, spec.timeout_s, self._watch) for node in range(1, self.nodes.num_nodes)
        }
        self._lost = [node for node, report in reports.items() if report is None]
        if self._lost:
            return self._without_nodes(LaunchStatus.FAILED, outcome.seconds, outcome.last_lines)
        return worst([outcome, *(report for report in reports.values() if report is not None)])

    def _report(self, number: int, node: int, timeout_s: float, watch: Watch) -> LaunchOutcome | None:
        """Return the outcome of the launch on ``node``, or None if the node is gone or exceeds the time."""
        key = f"outcome/{number}/{node}"
        deadline = time.monotonic() + timeout_s + self.silence_s
        while self._store is None or not self._store.check([key]):
            if node in watch.gone() or time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        return read_outcome(json.loads(self._store.get(key)), node)

    def _without_nodes(self, status: LaunchStatus, seconds: float = 0.0, lines: tuple[str, ...] = ()) -> LaunchOutcome:
        reasons = {} if self._watch is None else self._watch.reasons
        left = [f"node {node} left: {reasons[node]}" for node in self._lost if node in reasons]
        does = "does" if len(self._lost) == 1 else "do"
        line = (
            f"{rendezvous.named(self._lost, self.nodes.num_nodes)} {does} not answer any "
            "more: look at the output and the machine there, then start the same command on all nodes again"
        )
        return LaunchOutcome(
            status=status, node_rank=self._lost[0], exit_code=-1, last_lines=(*lines, *left, line), seconds=seconds
        )
