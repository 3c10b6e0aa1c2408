"""What the tuning commands say to bad input: one sentence with the way out, exit code 2, no traceback."""

import json
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main

_REQUEST = {
    "model": {"num_layers": 24, "hidden": 2048, "heads": 16, "seq": 1024},
    "hw": {"gpu": "A100", "num_gpus": 8},
    "parallel": {},
    "train": {"gbs": 32},
}


def _refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def test_a_search_on_an_unknown_device_names_the_known_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**_REQUEST, "hw": {"gpu": "NOPE", "num_gpus": 8}}))
    said = _refusal(["tune", "--request", str(path)], capsys)
    assert "unknown device 'NOPE'" in said
    assert "H100" in said
    assert "--device-file" in said


def test_requests_cut_off_in_the_middle_name_the_file_and_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.json"
    path.write_text('{"requests": [\n')
    said = _refusal(["predict", "--requests", str(path)], capsys)
    assert str(path) in said
    assert "line 2" in said


def test_a_knowledge_base_that_is_no_database_is_named_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "base.sqlite"
    path.write_bytes(b"not a database " * 300)
    said = _refusal(["knowledge", "show", str(path)], capsys)
    assert str(path) in said
    assert "Move it away" in said


def test_a_knowledge_base_that_is_not_there_is_not_created_by_showing_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "base.sqlite"
    assert str(path) in _refusal(["knowledge", "show", str(path)], capsys)
    assert not path.exists()
