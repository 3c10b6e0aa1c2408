"""The notes of a run on its launches."""

import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.interrupts import ended_like_ctrl_c
from mindspeed_autoparallel.runtime.features.auto_tuning import launches as launches_module
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import LAUNCHES_FILE, Launches
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchStatus


def test_only_launches_that_began_count_as_using_the_devices(tmp_path, monkeypatch, logged):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    statuses = [LaunchStatus.OK, LaunchStatus.FAILED, LaunchStatus.NOT_STARTED]
    ends = iter([LaunchOutcome(status=status, last_lines=("the end",)) for status in statuses])
    launches = Launches(
        SimpleNamespace(work_dir=tmp_path, launch_timeout_s=1.0), SimpleNamespace(launch=lambda spec: next(ends))
    )
    for _ in statuses:
        launches.on_devices("verify", {"kind": "verify"})
    assert launches.num_on_devices == 2
    assert [line.splitlines()[0] for line in logged] == [
        "launch verify-2: failed on node 0 after 0 s, exit code 0: the end",
        "launch verify-3: not started: the end",
    ]
    kept = read_json(tmp_path / LAUNCHES_FILE, "launches")["launches"]
    assert [record["status"] for record in kept] == ["ok", "failed", "not_started"]


def run_until(should_stop, stopped):
    """A trace that runs until it is stopped, 20 s at most; ``stopped`` gets whether it was."""
    deadline = time.monotonic() + 20
    while not should_stop() and time.monotonic() < deadline:
        time.sleep(0.01)
    stopped.append(should_stop())
    return LaunchOutcome(status=LaunchStatus.TIMED_OUT)


def test_a_signal_that_the_thread_of_a_trace_receives_ends_all_traces(tmp_path, monkeypatch):
    """The system chooses the thread, and a lock that the main thread waits for does not notice."""
    monkeypatch.setattr(sys, "argv", ["script.py"])
    stopped = []

    def receive_and_go_on(spec, ranks, log_dir, should_stop):
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return run_until(should_stop, stopped)

    monkeypatch.setattr(launches_module, "run_local_processes", receive_and_go_on)
    launches = Launches(SimpleNamespace(work_dir=tmp_path, launch_timeout_s=1.0), SimpleNamespace(log_dir=tmp_path))
    with pytest.raises(KeyboardInterrupt), ended_like_ctrl_c():
        launches.traces([{"kind": "trace"}])
    assert stopped == [True]
    kept = read_json(tmp_path / LAUNCHES_FILE, "launches")["launches"]
    assert [record["status"] for record in kept] == ["interrupted"]


def test_a_trace_whose_record_cannot_be_written_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py"])
    stopped = []

    def fail_or_go_on(spec, ranks, log_dir, should_stop):
        if spec.task["number"] == 1:
            raise OSError("no space left on device")
        return run_until(should_stop, stopped)

    monkeypatch.setattr(launches_module, "run_local_processes", fail_or_go_on)
    launches = Launches(SimpleNamespace(work_dir=tmp_path, launch_timeout_s=1.0), SimpleNamespace(log_dir=tmp_path))
    with pytest.raises(OSError, match="no space left"):
        launches.traces([{"number": 0}, {"number": 1}])
    assert stopped == [True]
