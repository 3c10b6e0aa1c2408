"""One place decides every launch: the coordinator on node 0. The other nodes run agents that do as told and report.

They meet in a TCPStore on the main node: no shared file system, no file whose existence means something.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, LaunchError
from mindspeed_autoparallel.runtime.launch.liveness import SILENCE_S, Beats, Watch
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchSpec, LaunchStatus, worst
from mindspeed_autoparallel.runtime.launch.processes import run_local_processes

_POLL_S = 0.2
_JOIN_TIMEOUT_S = 600.0


class Coordinator:
    """Node 0's side. Use as a context manager: agents are dismissed and every child is ended on the way out."""

    def __init__(
        self,
        *,
        num_nodes: int,
        num_processes_per_node: int,
        master_addr: str,
        master_port: int,
        log_dir: Path,
        join_timeout_s: float = _JOIN_TIMEOUT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.num_nodes = num_nodes
        self.num_processes_per_node = num_processes_per_node
        self.master_addr = master_addr
        self.master_port = master_port
        self.log_dir = log_dir
        self.join_timeout_s = join_timeout_s
        self.silence_s = silence_s
        self._store: Any = None
        self._watch: Watch | None = None
        self._lost: list[int] = []
        self._num_launches = 0

    def __enter__(self) -> Coordinator:
        if self.num_nodes > 1:
            self._store = _serve(self.master_addr, self.master_port)
            self._wait_for_nodes()
            self._watch = Watch(self._store, range(1, self.num_nodes), self.silence_s)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._store is not None:
            with contextlib.suppress(Exception):  # nobody may be left to say good-bye to
                self._store.set(f"launch/{self._num_launches}", json.dumps({"stop": True}))
                # The store dies with this process: let the agents read the word first.
                self._wait_for_keys([f"dismissed/{node}" for node in range(1, self.num_nodes)], 5.0)
            self._store = None

    def launch(self, spec: LaunchSpec) -> LaunchOutcome:
        """Run ``spec`` on every node; how it ended, never an exception for a launch that did not end well."""
        if self._lost:
            return self._without_nodes(0.0, "not started")
        number = self._num_launches
        self._num_launches += 1
        worker_port = free_port()
        if self._store is not None:
            order = {"spec": spec.to_json(), "worker_port": worker_port}
            self._store.set(f"launch/{number}", json.dumps(order))
        if self._watch is not None:
            self._watch.begin()
        aborted = f"abort/{number}"
        outcome = run_local_processes(
            spec,
            node_rank=0,
            num_processes=self.num_processes_per_node,
            num_nodes=self.num_nodes,
            master_addr=self.master_addr,
            master_port=worker_port,
            log_dir=self.log_dir,
            should_stop=lambda: self._watch is not None and (
                self._store.check([aborted]) or bool(self._watch.gone())
            ),
        )
        if self._watch is None:
            return outcome
        if outcome.status is not LaunchStatus.OK:
            self._store.set(aborted, "1")
        reports = {node: self._report(number, node, spec.timeout_s, self._watch) for node in range(1, self.num_nodes)}
        self._lost = [node for node, report in reports.items() if report is None]
        if self._lost:
            return self._without_nodes(outcome.seconds, *outcome.last_lines)
        return worst([outcome, *(report for report in reports.values() if report is not None)])

    def _report(self, number: int, node: int, timeout_s: float, watch: Watch) -> LaunchOutcome | None:
        """How the launch ended on ``node``, or nothing where the node is gone."""
        key = f"outcome/{number}/{node}"
        deadline = time.monotonic() + timeout_s + self.silence_s
        while not self._store.check([key]):
            if node in watch.gone() or time.monotonic() > deadline:
                return None
            time.sleep(_POLL_S)
        return LaunchOutcome.from_json(json.loads(self._store.get(key)))

    def _without_nodes(self, seconds: float, *lines: str) -> LaunchOutcome:
        nodes = ", ".join(map(str, self._lost))
        line = (
            f"node {nodes} of {self.num_nodes} does not answer any more: look at its output and its machine, then "
            "start the same command on all nodes again"
        )
        return LaunchOutcome(
            status=LaunchStatus.FAILED, node_rank=self._lost[0], exit_code=-1, last_lines=(*lines, line),
            seconds=seconds,
        )  # fmt: skip

    def _wait_for_nodes(self) -> None:
        keys = [f"node/{node}" for node in range(1, self.num_nodes)]
        missing = self._wait_for_keys(keys, self.join_timeout_s)
        if missing:
            nodes = ", ".join(key.partition("/")[2] for key in missing)
            raise LaunchError(
                f"node {nodes} of {self.num_nodes} did not come to {self.master_addr}:{self.master_port} within "
                f"{self.join_timeout_s:.0f} s. Start the same script there with --node-rank {nodes}, check that "
                "the port is open between the nodes, and that --master-addr and --master-port are the same on all."
            )

    def _wait_for_keys(self, keys: list[str], timeout_s: float) -> list[str]:
        """Those of ``keys`` that are still not set after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        missing = keys
        while missing and time.monotonic() < deadline:
            missing = [key for key in missing if not self._store.check([key])]
            if missing:
                time.sleep(_POLL_S)
        return missing


def run_agent(
    *,
    node_rank: int,
    num_nodes: int,
    num_processes_per_node: int,
    master_addr: str,
    master_port: int,
    log_dir: Path,
    join_timeout_s: float = _JOIN_TIMEOUT_S,
) -> int:
    """Another node's side: run what the coordinator orders until it dismisses us; returns the number of launches."""
    store = _join(master_addr, master_port, node_rank, join_timeout_s)
    beats = Beats(store, node_rank)
    number = 0
    try:
        while True:
            key = f"launch/{number}"
            while not store.check([key]):
                beats.beat()
                time.sleep(_POLL_S)
            order = json.loads(store.get(key))
            if order.get("stop"):
                store.set(f"dismissed/{node_rank}", "1")
                return number
            aborted = f"abort/{number}"

            def should_stop(aborted: str = aborted) -> bool:
                beats.beat()
                return bool(store.check([aborted]))

            outcome = run_local_processes(
                LaunchSpec.from_json(order["spec"]),
                node_rank=node_rank,
                num_processes=num_processes_per_node,
                num_nodes=num_nodes,
                master_addr=master_addr,
                master_port=order["worker_port"],
                log_dir=log_dir,
                should_stop=should_stop,
            )
            if outcome.status is not LaunchStatus.OK:
                store.set(aborted, "1")
            store.set(f"outcome/{number}/{node_rank}", json.dumps(outcome.to_json()))
            number += 1
    except Exception as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            f"node {node_rank} lost the main node {master_addr}:{master_port}: {error}. Look at the output on node 0."
        ) from error


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def check_port_is_free(port: int) -> None:
    """Raise ``ConfigError`` when something already listens on ``port`` of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"--master-port {port} cannot be used on this node: {error.strerror}. "
                "Choose another port, the same on every node, or end the process that holds it."
            ) from error


def _serve(master_addr: str, master_port: int) -> Any:
    from torch.distributed import TCPStore

    check_port_is_free(master_port)
    return TCPStore(master_addr, master_port, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)


def _join(master_addr: str, master_port: int, node_rank: int, timeout_s: float) -> Any:
    from torch.distributed import TCPStore

    try:
        store = TCPStore(master_addr, master_port, None, False, timeout=timedelta(seconds=timeout_s))
    except Exception as error:
        raise LaunchError(
            f"node {node_rank} cannot reach the main node at {master_addr}:{master_port} within {timeout_s:.0f} s. "
            "Start the script with --node-rank 0 there, and check --master-addr, --master-port and the firewall."
        ) from error
    store.set(f"node/{node_rank}", json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    return store
