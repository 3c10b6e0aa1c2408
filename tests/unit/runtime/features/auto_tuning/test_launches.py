"""The notes of a run on its launches."""

import sys
from types import SimpleNamespace

from mindspeed_autoparallel.files import read_json
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
