"""Starts the processes of one launch on this node, watches them, and always ends them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.interrupts import held_back
from mindspeed_autoparallel.redaction import masked_text, secret_values
from mindspeed_autoparallel.runtime.flags.registration import without_switches
from mindspeed_autoparallel.runtime.launch.children import child_environment, private_log, secret_variables
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.launch.ports import LOOPBACK_ENVIRONMENT, gloo_on_loopback, loopback_store
from mindspeed_autoparallel.runtime.megatron.features import TASK_VARIABLE

OUT_OF_MEMORY_EXIT_CODE = 77
"""Exit code of a measuring process whose device ran out of memory."""

_OUT_OF_MEMORY_SIGNS = ("out of memory", "MemoryError", "can't allocate memory")
_NOISE = re.compile(r"nanobind: |See https://nanobind|\s*- (leaked (type|function|instance) |\.\.\. skipped remainder)")
"""Lines that a library's bindings print after the error of every failing process."""
_NUM_LAST_LINES = 12
_NUM_LAST_ONES = 60
"""Number of lines that are searched for signs of exhausted memory."""
_NUM_SEARCHED_LINES = 400
"""Number of lines that are searched for a traceback."""
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_GRACE_S = 5.0
_COPIED_S = 2.0
"""Longest wait, after the processes end, until their whole output is in the logs."""
_PR_SET_PDEATHSIG = 1
_NEVER_A_CONSEQUENCE = tuple(-number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL))
"""Exit codes that a lost peer cannot cause."""


@dataclass(frozen=True, kw_only=True)
class LocalRanks:
    """The processes of one node among those of all nodes."""

    node_rank: int = 0
    num_processes: int = 1
    """Number of processes on this node, the same on every node."""
    num_nodes: int = 1
    master_addr: str = "localhost"
    master_port: int = 0
    """Port of rank 0; unused on a single node, whose ranks use the loopback address."""

    def environment(self, local_rank: int, port: int) -> dict[str, str]:
        """Return the variables from which torch reads a process's rank and world size."""
        place = {
            "RANK": str(self.rank(local_rank)),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
            "LOCAL_WORLD_SIZE": str(self.num_processes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(port),
        }
        return {**place, **LOOPBACK_ENVIRONMENT} if self.num_nodes == 1 else place

    def rank(self, local_rank: int) -> int:
        """Return the rank among the processes of all nodes."""
        return self.node_rank * self.num_processes + local_rank


def run_local_processes(
    spec: LaunchSpec,
    ranks: LocalRanks = LocalRanks(),
    *,
    log_dir: Path,
    should_stop: Callable[[], bool] = lambda: False,
    parent_environment: Mapping[str, str] | None = None,
) -> LaunchOutcome:
    """Run ``spec`` as the processes of this node and wait for them.

    All of them are killed when one fails, when the launch times out, when ``should_stop`` returns true, and when this
    process is interrupted or dies.
    """
    log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    task_file = log_dir / f"{spec.launch_id}.node{ranks.node_rank}.task.json"
    write_json_atomic(task_file, spec.task)
    started = time.monotonic()
    parent = os.environ if parent_environment is None else parent_environment
    secrets = secret_values(spec.argv) | secret_variables({**parent, **spec.environment})
    children: list[subprocess.Popen[bytes]] = []
    logs: list[Path] = []
    copiers: list[threading.Thread] = []
    held = contextlib.ExitStack()
    try:
        port = ranks.master_port
        if ranks.num_nodes == 1:
            port = held.enter_context(loopback_store())
            parent = {**gloo_on_loopback(), **parent}
        for local_rank in range(ranks.num_processes):
            own = {TASK_VARIABLE: str(task_file.resolve()), **ranks.environment(local_rank, port)}
            environment = child_environment(parent, {**spec.environment, **own})
            logs.append(log_dir / f"{spec.launch_id}.rank{ranks.rank(local_rank)}.log")
            stream, copier = private_log(logs[-1], secrets)
            copiers += [] if copier is None else [copier]
            with stream, held_back():
                children.append(
                    subprocess.Popen(
                        [sys.executable, *without_switches(spec.argv)],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
                    )
                )
        outcome = _watch(children, logs, spec, ranks.node_rank, started, should_stop)
    finally:
        with held_back():
            _end(children)
            held.close()
            for copier in copiers:
                copier.join(_COPIED_S)
    return replace(outcome, last_lines=tuple(masked_text(line, secrets) for line in outcome.last_lines))


def _watch(
    children: list[subprocess.Popen[bytes]],
    logs: list[Path],
    spec: LaunchSpec,
    node_rank: int,
    started: float,
    should_stop: Callable[[], bool],
) -> LaunchOutcome:
    while True:
        codes = [child.poll() for child in children]
        seconds = time.monotonic() - started
        failed = next((index for index, code in enumerate(codes) if code not in (None, 0)), None)
        if failed is not None:
            # Another process often logs the root cause a moment later.
            time.sleep(0.5)
            return _failure([child.poll() for child in children], logs, node_rank, seconds)
        if all(code == 0 for code in codes):
            return LaunchOutcome(status=LaunchStatus.OK, node_rank=node_rank, seconds=seconds)
        if seconds > spec.timeout_s or should_stop():
            lines = (*last_lines(logs[0]), f"(given up after {seconds:.0f} s)")
            return LaunchOutcome(
                status=LaunchStatus.TIMED_OUT,
                node_rank=node_rank,
                exit_code=-1,
                last_lines=lines,
                log=str(logs[0]),
                seconds=seconds,
            )
        time.sleep(0.05)


def _failure(codes: list[int | None], logs: list[Path], node_rank: int, seconds: float) -> LaunchOutcome:
    failures = [(code, log) for code, log in zip(codes, logs, strict=True) if code not in (None, 0)]
    texts = {log: last_lines(log, _NUM_SEARCHED_LINES) for _, log in failures}
    for code, log in failures:
        if code == OUT_OF_MEMORY_EXIT_CODE or any(
            sign in line for line in texts[log][-_NUM_LAST_ONES:] for sign in _OUT_OF_MEMORY_SIGNS
        ):
            status = LaunchStatus.OUT_OF_MEMORY
            break
    else:
        status = LaunchStatus.FAILED
        # A killed rank is the cause: its peers lose their connection, and their scripts fail with other messages.
        code, log = min(
            failures,
            key=lambda item: (
                item[0] not in _NEVER_A_CONSEQUENCE,
                any("Connection" in line for line in texts[item[1]][-3:]),
            ),
        )
    return LaunchOutcome(
        status=status,
        node_rank=node_rank,
        exit_code=int(code or 0),
        last_lines=whole_error(texts[log]),
        log=str(log),
        seconds=seconds,
    )


def whole_error(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last error of a process's output: its traceback with chained ones, or the last lines."""
    starts = [index for index, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return tuple(lines[-_NUM_LAST_LINES:])
    start = starts.pop()
    while starts and any(chain in lines[start - 1] for chain in _CHAINED):
        start = starts.pop()
    return tuple(lines[start:])


def last_lines(log: Path, count: int = _NUM_LAST_LINES) -> tuple[str, ...]:
    """Return the last ``count`` lines of ``log`` that are neither empty nor noise."""
    with contextlib.suppress(OSError), log.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 65536))
        lines = stream.read().decode("utf-8", errors="replace").splitlines()
        return tuple(line for line in lines if line.strip() and not _NOISE.match(line))[-count:]
    return ()


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            # The whole session: data loader workers and compilers are grandchildren.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and any(child.poll() is None for child in children):
            time.sleep(0.02)
        if all(child.poll() is not None for child in children):
            break


def _die_with_parent() -> None:
    # Between fork and exec: a child must not outlive a coordinator that is killed outright.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
