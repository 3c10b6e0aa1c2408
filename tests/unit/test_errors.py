"""What an error is called in one line, also where Python gives it no message."""

import re
import sys
import types
from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import first_line
from mindspeed_autoparallel.profiles import MeasuredAt


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "MemoryError"),
        (RuntimeError(" \n"), "RuntimeError"),
        (RuntimeError("\nout of memory\nat 0x1"), "out of memory"),
        (ValueError("one"), "one"),
    ],
)
def test_an_error_has_a_first_line(error, line):
    assert first_line(error) == line


def test_no_file_takes_the_first_line_of_a_message_that_may_be_empty():
    package = Path(__file__).resolve().parents[2] / "mindspeed_autoparallel"
    wrong = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"str\(error\).*\.splitlines\(\)\[0\]", path.read_text())
    ]
    assert not wrong


def test_a_memory_error_at_a_measured_point_is_named_and_not_kept(monkeypatch, tmp_path, capsys):
    from mindspeed_autoparallel.runtime.launch.processes import OUT_OF_MEMORY_EXIT_CODE
    from mindspeed_autoparallel.runtime.profiling.measure import communication, point, worker
    from mindspeed_autoparallel.runtime.profiling.measure.task import MeasureTask

    def without_memory(*_):
        raise MemoryError

    training = types.ModuleType("megatron.training")
    training.get_args = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(communication, "measure_links", lambda *_: ())
    monkeypatch.setattr(point, "measure_point", without_memory)
    at = MeasuredAt()
    task = MeasureTask(points=(at,), result_dir=str(tmp_path), num_layers={}, model=None)
    with pytest.raises(SystemExit) as ended:
        worker.measure_all(task, None, None, None)
    assert ended.value.code == OUT_OF_MEMORY_EXIT_CODE
    assert not task.result_file(at).exists()
    assert "the memory of this machine ran out at TP1 CP1 EP1 MBS1: MemoryError" in capsys.readouterr().out
