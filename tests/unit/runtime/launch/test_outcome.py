"""How a launch ended, in words."""

import json

import pytest

from mindspeed_autoparallel.profiles.records import json_of
from mindspeed_autoparallel.runtime.launch.orders import read_outcome
from mindspeed_autoparallel.runtime.launch.outcome import LaunchOutcome, LaunchStatus, worst
from mindspeed_autoparallel.runtime.launch.processes import last_lines

LAST = ("Traceback", "  RuntimeError: broken")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (LaunchStatus.FAILED, 3, "failed on node 1 after 7 s, exit code 3: RuntimeError: broken"),
        (LaunchStatus.FAILED, -9, "failed on node 1 after 7 s, ended by signal 9 (Killed): RuntimeError: broken"),
        (LaunchStatus.NOT_STARTED, -1, "not started: RuntimeError: broken"),
        (LaunchStatus.OK, 0, "ok on node 1 after 7 s: RuntimeError: broken"),
    ],
)
def test_one_line_gives_the_outcome_and_the_reason(status, code, said):
    outcome = LaunchOutcome(status=status, exit_code=code, node_rank=1, seconds=7.1, last_lines=LAST)
    assert outcome.summary() == said
    assert outcome.describe().splitlines() == [said, "    Traceback", f"    {LAST[1]}"]
    assert read_outcome(json.loads(json.dumps(json_of(outcome))), 1) == outcome


def test_the_cause_comes_first_and_a_long_traceback_is_cut():
    lines = ("Traceback", *(f"  line {number}" for number in range(150)), "ValueError: heads")
    outcome = LaunchOutcome(status=LaunchStatus.FAILED, exit_code=1, last_lines=lines, log="work/rank0.log")
    described = outcome.describe().splitlines()
    assert described[0].endswith("exit code 1: ValueError: heads")
    assert described[1].strip() == "(122 lines before)"
    assert described[-2:] == ["    ValueError: heads", "    (the whole log is work/rank0.log)"]
    assert len(described) == 33


def test_an_outcome_without_a_log_quotes_no_line():
    assert LaunchOutcome(status=LaunchStatus.FAILED, exit_code=1).summary() == "failed on node 0 after 0 s, exit code 1"


def test_output_of_bindings_at_exit_does_not_hide_the_error(tmp_path):
    leaks = [f' - leaked {kind} "x"' for kind in ("type", "function", "instance")] * 30
    log = tmp_path / "log"
    log.write_text(
        "\n".join(
            [
                *LAST,
                "",
                "nanobind: leaked 4 instances!",
                *leaks,
                " - ... skipped remainder",
                "nanobind: this is likely caused by a reference counting issue in the binding code.",
                "See https://nanobind.readthedocs.io/en/latest/refleaks.html",
            ]
        )
    )
    assert last_lines(log) == LAST


@pytest.mark.parametrize("status", list(LaunchStatus))
def test_every_way_to_end_has_its_place_among_those_of_other_nodes(status):
    outcomes = [LaunchOutcome(status=LaunchStatus.OK), LaunchOutcome(status=status, node_rank=1)]
    assert worst(outcomes).status is status
    assert worst([LaunchOutcome(status=LaunchStatus.OUT_OF_MEMORY), *outcomes]).status is LaunchStatus.OUT_OF_MEMORY
