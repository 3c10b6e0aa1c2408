"""Every launch of a tuning run: started under an id and recorded with its outcome."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json, write_json_atomic
from mindspeed_autoparallel.interrupts import LONGEST_WAIT_S
from mindspeed_autoparallel.profiles.records import json_of
from mindspeed_autoparallel.redaction import masked_words
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.launch.coordinator import Coordinator
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.launch.processes import LocalRanks, run_local_processes

ARGV_FILE = "auto_tuning_modified_argv.json"
LAUNCHES_FILE = "launches.json"
INTERRUPTED = "interrupted"
_RUNNING = "running"
PURPOSES = {
    "trace": ("OOTB_OPTIMIZER_PARSE_ARGS", "OOTB_OPTIMIZER_PARSE_MODEL"),
    "calibrate": ("OOTB_OPTIMIZER_PROFILING",),
    "verify": ("OOTB_OPTIMIZER_PROFILING",),
}
"""Environment variables that are set to TRUE in child processes, by the purpose of the launch."""

_LOGGER = logging.getLogger(__name__)


@dataclass
class LaunchRecord:
    """A launch of this run, or of an earlier one in the same work dir."""

    id: str
    number: int
    purpose: str
    status: str
    """Its outcome, ``running`` or ``interrupted``."""
    started: float
    """Seconds since the epoch."""
    outcome: LaunchOutcome | None = None

    def to_json(self) -> dict[str, object]:
        """Return its entry of ``launches.json``."""
        own = {name: value for name, value in vars(self).items() if name != "outcome"}
        ended = {} if self.outcome is None else json_of(self.outcome)
        return {**own, **ended, "status": self.status}


class Launches:
    """Starts processes for a request and keeps ``launches.json``."""

    def __init__(self, request: TuningRequest, coordinator: Coordinator) -> None:
        self.request = request
        self.coordinator = coordinator
        self.records: list[LaunchRecord] = []
        """Launches of this run."""
        self._earlier = _earlier(request.work_dir / LAUNCHES_FILE)
        self._numbers = itertools.count(1 + max((record["number"] for record in self._earlier), default=0))
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    @property
    def num_on_devices(self) -> int:
        """Count launches that used the devices: a trace runs on the main node's CPU, and not every launch can start."""
        unused = LaunchStatus.NOT_STARTED.value
        return sum(record.purpose != "trace" and record.status != unused for record in self.records)

    def traces(self, tasks: Sequence[dict[str, object]]) -> list[LaunchOutcome]:
        """Run one process on this node's CPU per task, all at once; an interrupt ends them all."""
        with ThreadPoolExecutor(len(tasks)) as pool:
            try:
                running = [pool.submit(self._trace, task) for task in tasks]
                while (state := wait(running, LONGEST_WAIT_S, FIRST_EXCEPTION)).not_done:
                    for ended in state.done:
                        ended.result()
                return [one.result() for one in running]
            except BaseException:
                self._stopping.set()
                raise

    def _trace(self, task: dict[str, object]) -> LaunchOutcome:
        spec = self._spec("trace", task, tuple(sys.argv), {"MINDSPEED_AUTOPARALLEL_DEVICE": "cpu"})
        return self._kept(
            "trace",
            spec,
            lambda: run_local_processes(
                spec, LocalRanks(), log_dir=self.coordinator.log_dir, should_stop=self._stopping.is_set
            ),
        )

    def on_devices(
        self,
        purpose: str,
        task: dict[str, object],
        argv: tuple[str, ...] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> LaunchOutcome:
        """Run the user's script on all devices of all nodes, with ``argv`` instead of its own arguments."""
        spec = self._spec(purpose, task, argv or tuple(sys.argv), dict(environment or {}))
        return self._kept(purpose, spec, lambda: self.coordinator.launch(spec))

    def _spec(self, purpose: str, task: dict[str, object], argv: tuple[str, ...], extra: dict[str, str]) -> LaunchSpec:
        with self._lock:
            number = next(self._numbers)
        argv_file = self.request.work_dir / ARGV_FILE
        write_json_atomic(argv_file, {"schema_version": 1, "purpose": purpose, "argv": masked_words(argv)})
        environment = dict.fromkeys(PURPOSES[purpose], "TRUE")
        return LaunchSpec(
            launch_id=f"{purpose}-{number}",
            argv=argv,
            environment={"OOTB_OPTIMIZER_MODIFIED_ARGV_PATH": str(argv_file), **environment, **extra},
            task=task,
            timeout_s=self.request.launch_timeout_s,
        )

    def _kept(self, purpose: str, spec: LaunchSpec, run: Callable[[], LaunchOutcome]) -> LaunchOutcome:
        record = LaunchRecord(
            id=spec.launch_id,
            number=int(spec.launch_id.rpartition("-")[2]),
            purpose=purpose,
            status=_RUNNING,
            started=time.time(),
        )
        self.records.append(record)
        self._write()
        try:
            outcome = run()
        except BaseException:
            record.status = INTERRUPTED
            with contextlib.suppress(ConfigError):  # such as a full disk; the first error is raised
                self._write()
            raise
        record.outcome = outcome
        record.status = INTERRUPTED if self._stopping.is_set() else outcome.status.value
        self._write()
        if record.status not in (INTERRUPTED, LaunchStatus.OK.value):
            _LOGGER.warning(f"launch {spec.launch_id}: {outcome.describe()}")
        return outcome

    def _write(self) -> None:
        with self._lock:
            launches = [*self._earlier, *(record.to_json() for record in self.records)]
            write_json_atomic(self.request.work_dir / LAUNCHES_FILE, {"schema_version": 1, "launches": launches})


def _earlier(path: Path) -> list[dict[str, Any]]:
    """Return launches of earlier runs in this work dir; those still marked as running were interrupted with their
    tuner."""
    if not path.exists():
        return []
    try:
        records = read_json(path, "list of launches")["launches"]
        return [
            {
                **record,
                "number": int(record["number"]),
                "status": INTERRUPTED if record["status"] == _RUNNING else record["status"],
            }
            for record in records
        ]
    except (ConfigError, TypeError, KeyError, ValueError):
        return []  # another release's, or broken: it is only a record
