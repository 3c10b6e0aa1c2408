"""A tracing process answers in order, and ends in every case."""

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


def test_answers_come_in_the_order_of_the_requests(tracing) -> None:
    tracing()
    requests = [
        TraceRequest(**{**_LAYER, "hidden": 64 * size, "tensor": tensor}) for size in (3, 1, 2) for tensor in (2, 1)
    ]
    answers = process.trace_all(requests)
    assert [answer["hidden"] for answer in answers] == [192, 192, 64, 64, 128, 128]


def test_a_process_that_dies_is_reported_with_its_last_lines(tracing) -> None:
    tracing("sys.exit('no such layer')")
    with pytest.raises(LaunchError, match=r"exit code 1.*\n.*no such layer"):
        process.trace(TraceRequest(**_LAYER))


def test_a_process_that_hangs_is_ended(tracing) -> None:
    tracing("time.sleep(600)")
    with pytest.raises(LaunchError, match="did not end within 1 s"):
        process.trace(TraceRequest(**_LAYER), timeout_s=1)
