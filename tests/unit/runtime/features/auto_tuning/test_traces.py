"""Tracing processes share points, and what one of them dies of costs no other point: real children, real deaths."""

import json
import os
import signal
import sys
import textwrap
from types import SimpleNamespace

import pytest

from mindspeed_autoparallel.errors import LaunchError, ProfileError
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_tuning.argv import without_places
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
from mindspeed_autoparallel.runtime.features.auto_tuning.traces import Traces
from mindspeed_autoparallel.runtime.flags.flag import flags_of
from mindspeed_autoparallel.runtime.flags.registration import flag_groups

SCRIPT = """
import json, os, resource, signal, sys, time
from pathlib import Path
from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask
from mindspeed_autoparallel.runtime.profiling.trace.work_queue import WorkQueue

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
order = json.loads(Path(os.environ["MINDSPEED_AUTOPARALLEL_TASK"]).read_text())
task, here, process = MeasureTask.from_json(order["measure"]), Path(sys.argv[0]).parent, order["process"]

def times(name):
    "How often this was asked, now included, by any process."
    with (here / name).open("a") as stream:
        stream.write("x")
    return (here / name).stat().st_size

def die(number):
    print("last words", flush=True)
    os.kill(os.getpid(), number)

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

def set_up():
    {set_up}

def trace(size):
    {trace}

set_up()
for point in task.points:
    if WorkQueue(Path(order["queue"])).claim(point, process):
        trace(point.micro_batch_size)
        write_json_atomic(task.result_file(point), {{"status": "ok", "variants": {{}}, "by": process}})
"""
POINTS = tuple(MeasuredAt(micro_batch_size=size) for size in (1, 2, 3, 4))


@pytest.fixture
def tracing(tmp_path, monkeypatch):
    """Traces ``POINTS`` with a script that runs the given steps before it takes a point, and at each; returns the
    results."""

    def run(set_up="pass", trace="pass", num_processes=2, timeout_s=600.0):
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(set_up=textwrap.indent(set_up, " " * 4).strip(), trace=trace))
        monkeypatch.setattr(sys, "argv", [str(script)])
        monkeypatch.setattr(os, "cpu_count", lambda: 2 * num_processes)
        request = SimpleNamespace(
            work_dir=tmp_path / "work",
            num_ranks=4,
            launch_timeout_s=timeout_s,
            description=SimpleNamespace(modules=[], model_hash="model"),
        )
        plan = SimpleNamespace(variants=[], recompute={}, points=POINTS, left_out={})
        launches = Launches(request, SimpleNamespace(log_dir=tmp_path / "logs"))
        found, _ = Traces(request, plan, 0).take(launches)
        rounds = sorted(record.status for record in launches.records)
        assert not list((tmp_path / "work").rglob("queue"))
        return SimpleNamespace(found=found, rounds=rounds, records=launches.records, folder=tmp_path / "work")

    return run


def failed(found):
    return {point.micro_batch_size: result.failure.reason for point, result in found.items() if result.failure}


def test_a_free_process_takes_the_next_point(tracing):
    # Whoever has the first point waits there for the second, which only the other process can do meanwhile.
    second = "task.result_file(next(point for point in task.points if point.micro_batch_size == 2))"
    done = tracing(trace=f"wait_for({second}) if size == 1 else None")
    assert done.rounds == ["ok", "ok"]
    files = {path.stem: json.loads(path.read_text()) for path in done.folder.rglob("*MBS*.json")}
    by = [files[point.label().replace(" ", "_")]["by"] for point in POINTS]
    assert by[1] == 1 - by[0]


def test_one_of_two_processes_may_die_after_the_set_up_and_the_other_does_everything(tracing):
    done = tracing(set_up="die(signal.SIGSEGV) if process == 0 else None")
    assert done.rounds == ["failed", "ok"]
    assert not failed(done.found)
    (dead,) = (record for record in done.records if record.status == "failed")
    assert (dead.outcome.exit_code, dead.outcome.last_lines) == (-signal.SIGSEGV, ("last words",))


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSEGV"])
def test_processes_that_all_die_before_their_first_point_are_started_once_more(tracing, number):
    done = tracing(set_up=f"if times('started') <= 2:\n    die(signal.{number})")
    # Killed is what the system does when memory runs short: half as many then.
    assert done.rounds == ["failed"] * 2 + ["ok"] * (1 if number == "SIGKILL" else 2)
    assert not failed(done.found)


def test_only_points_that_the_script_cannot_be_set_up_in_are_left_out(tracing):
    done = tracing(
        set_up="die(signal.SIGSEGV) if task.points[0].micro_batch_size == 1 else None",
        trace="die(signal.SIGSEGV) if size == 1 else None",
        num_processes=1,
    )
    assert done.rounds == ["failed", "failed"]
    assert list(failed(done.found)) == [1]


def test_a_script_that_cannot_be_set_up_at_all_is_started_once_and_quoted_whole(tracing, tmp_path):
    with pytest.raises(LaunchError, match=r"the script does not start.*exit code 1") as raised:
        tracing(set_up="print('about to read')\nopen('no such data')", num_processes=1)
    # Not the last line alone: where it was asked for, too.
    for words in ("Traceback (most recent call last)", "in set_up", "No such file or directory: 'no such data'"):
        assert words in str(raised.value)
    assert len(list((tmp_path / "logs").glob("*.rank0.log"))) == 1


def test_a_layout_that_megatron_refuses_at_the_start_is_not_the_scripts_fault(tracing):
    refuse = "def validate_args():\n    raise AssertionError('TP 1')\nif task.points[0].micro_batch_size == 1:\n"
    done = tracing(set_up=refuse + "    validate_args()", num_processes=1)
    assert done.rounds == ["failed", "ok"]
    assert not failed(done.found)


def test_a_set_up_that_hangs_is_not_waited_for_twice(tracing):
    done = tracing(set_up="time.sleep(600)", num_processes=1, timeout_s=1.0)
    assert done.rounds == ["timed_out"]
    assert all("given up after 1 s" in reason for reason in failed(done.found).values())


def test_a_point_that_memory_did_not_suffice_for_is_tried_again_with_fewer_processes(tracing):
    done = tracing(trace="die(signal.SIGKILL) if size == 2 and times('tried') == 1 else None")
    assert done.rounds == ["failed", "ok", "ok"]
    assert not failed(done.found)


def test_a_point_that_its_process_dies_at_whenever_it_is_tried_is_left_out_alone(tracing):
    done = tracing(trace="die(signal.SIGKILL) if size == 2 else None")
    assert done.rounds == ["failed", "failed", "ok"]
    assert list(failed(done.found)) == [2]
    crashed = tracing(trace="die(signal.SIGSEGV) if size == 2 else None", num_processes=1)
    # No memory in sight: not tried again; another process goes on with what is left.
    assert crashed.rounds == ["failed", "ok"]
    assert list(failed(crashed.found)) == [2]


def test_a_script_that_ends_without_training_is_refused_with_the_reason(tracing):
    with pytest.raises(ProfileError, match="ended before training started"):
        tracing(set_up="sys.exit(0)")


def test_flags_that_say_where_results_go_make_no_other_traces() -> None:
    model = ["--num-layers", "4", "--bf16"]
    places = [
        "--auto-tuning-work-dir",
        "out",
        "--auto-parallel-calibrate",
        "mine.json",
        "--auto-parallel-data",
        "data.json",
        "--auto-parallel-data-oom-steps",
        "5",
        "--nnodes",
        "2",
        "--save",
        "kept",
    ]
    assert without_places([*model, *places]) == without_places(model) == model


CHANGE_WHAT_IS_TRACED = {
    *("--auto-parallel-plan", "--operator-plan"),
    *("--hetero-parallel", "--auto-parallel-hetero", "--hetero-model"),
    *("--hetero-encoder-mbs-scale", "--hetero-balance", "--hetero-memory"),
    *("--data-balance", "--order-microbatches"),
}
"""Flags of ours that train the model another way: all others must leave finished traces as they are."""


def test_every_flag_of_ours_is_classified_by_whether_it_changes_traces() -> None:
    ours = {flag.name for group in flag_groups() for flag in flags_of(group)}
    model = ["--num-layers", "4"]
    changing = {name for name in ours if without_places([*model, name, "1"]) != model}
    assert changing == CHANGE_WHAT_IS_TRACED
    assert changing == {name for name in ours if without_places([*model, f"{name}=1"]) != model}
