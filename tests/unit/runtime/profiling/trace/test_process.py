"""Tracing processes share the work, answer in order, and end in every case."""

from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import LaunchError
from mindspeed_autoparallel.runtime.profiling.trace import process
from mindspeed_autoparallel.runtime.profiling.trace.request import TraceRequest

_LAYER = {"hidden": 64, "heads": 4, "sequence": 32}
_ECHO = """
import json, os, sys, time
print("words of a library")
for line in sys.stdin:
    for request in json.loads(line):
        {act}
        print("TRACE " + json.dumps({{"index": 0, "hidden": request["hidden"], "process": os.getpid()}}), flush=True)
"""


@pytest.fixture
def tracing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a script in the place of the tracing process; it does ``act`` before every answer."""

    def put(act: str = "pass") -> None:
        script = tmp_path / "tracing.py"
        script.write_text(_ECHO.format(act=act))
        monkeypatch.setattr(process, "_COMMAND", (str(script),))

    return put


def test_kept_traces_are_not_repeated(tracing, tmp_path: Path) -> None:
    tracing()
    request = TraceRequest(**_LAYER)
    first = process.trace(request, tmp_path)
    assert first["hidden"] == 64
    tracing("sys.exit(1)")
    assert process.trace(request, tmp_path) == first
    with pytest.raises(LaunchError):
        process.trace(TraceRequest(**{**_LAYER, "hidden": 128}), tmp_path)


def test_a_process_that_is_free_takes_the_next_layout(tracing) -> None:
    # The first layout's process waits until all others are answered, which only its neighbour can have done.
    tracing(
        "open(sys.argv[0] + str(request['tensor']), 'w').close()\n"
        "        while request['tensor'] == 1 and not os.path.exists(sys.argv[0] + '8'): time.sleep(0.01)"
    )
    requests = [TraceRequest(**{**_LAYER, "heads": 8, "tensor": tensor}) for tensor in (8, 1, 4, 2)]
    answers = process.trace_all(requests, num_processes=2)
    slow, *others = sorted(answers, key=lambda answer: answer["process"] != answers[1]["process"])
    assert slow["process"] not in {answer["process"] for answer in others}
    assert len({answer["process"] for answer in others}) == 1


def test_answers_come_in_the_order_of_the_requests(tracing) -> None:
    tracing()
    requests = [
        TraceRequest(**{**_LAYER, "hidden": 64 * size, "tensor": tensor}) for size in (3, 1, 2) for tensor in (2, 1)
    ]
    answers = process.trace_all(requests, num_processes=3)
    assert [answer["hidden"] for answer in answers] == [192, 192, 64, 64, 128, 128]


def test_a_process_that_dies_is_reported_with_its_last_lines(tracing) -> None:
    tracing("sys.exit('no such layer')")
    with pytest.raises(LaunchError, match=r"exit code 1.*\n.*no such layer"):
        process.trace(TraceRequest(**_LAYER))


def test_a_request_at_which_a_process_dies_is_retried_once_and_costs_nothing_else(tracing, tmp_path: Path) -> None:
    tracing(
        "if request['hidden'] == 128: sys.exit('no such layer')\n"
        "        if request['hidden'] == 192 and not os.path.exists(sys.argv[0] + 'x'):\n"
        "            open(sys.argv[0] + 'x', 'w').close(), os.abort()"
    )
    requests = [TraceRequest(**{**_LAYER, "hidden": hidden}) for hidden in (64, 128, 192, 256)]
    answers = process.trace_all(requests, tmp_path / "cache")
    assert [answer.get("hidden") for answer in answers] == [64, None, 192, 256]
    assert "no such layer" in answers[1]["error"]
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_processes_that_die_at_everything_are_not_started_for_every_trace(tracing, tmp_path: Path) -> None:
    tracing("open(sys.argv[0] + 'x', 'a').write('x'), sys.exit('no torch')")
    requests = [TraceRequest(**{**_LAYER, "hidden": 64 * size}) for size in range(1, 30)]
    with pytest.raises(LaunchError, match="no torch"):
        process.trace_all(requests)
    assert (tmp_path / "tracing.pyx").stat().st_size < len(requests)


def test_a_process_that_hangs_is_ended(tracing) -> None:
    tracing("time.sleep(600)")
    with pytest.raises(LaunchError, match="did not end within 1 s"):
        process.trace(TraceRequest(**_LAYER), timeout_s=1)
