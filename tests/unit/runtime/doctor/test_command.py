"""``mindspeed-autoparallel doctor`` on the machine the tests run on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main


def test_json_is_all_that_stdout_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) in (0, 1)
    value = json.loads(capsys.readouterr().out)
    assert value["schema_version"] == 1
    assert {finding["check"] for finding in value["findings"]} >= {"device", "versions", "patches"}


def test_a_problem_in_the_script_ends_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text("torchrun --nnodes 2 --master-addr localhost train.py --auto-parallel-mm\n")
    before = script.read_bytes()
    assert main(["doctor", "--script", str(script)]) == 1
    assert "every node waits for itself" in capsys.readouterr().out
    assert script.read_bytes() == before


def test_export_lines_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text("export CUDA_LAUNCH_BLOCKING=1\npython train.py\n")
    main(["doctor", "--script", str(script), "--format", "export"])
    lines = capsys.readouterr().out.split("\n")
    assert "export CUDA_LAUNCH_BLOCKING=0" in lines
    assert all(line.startswith("export ") for line in lines if line)
