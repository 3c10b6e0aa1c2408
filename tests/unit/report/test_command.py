"""``mindspeed-autoparallel report``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from example_plan import example_plan

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.report import render_table


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    example_plan().write(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_writes_page_and_trace(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "out" / "p.html", tmp_path / "out" / "t.json"
    assert main(["report", "--plan", str(plan_file), "--page", str(page), "--trace", str(trace)]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert json.loads(trace.read_text())["traceEvents"]
    assert str(page) in capsys.readouterr().out


def test_prints_the_table_by_default(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--plan", str(plan_file)]) == 0
    assert capsys.readouterr().out == render_table(example_plan())


def test_json_is_alone_on_stdout(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--plan", str(plan_file), "--json", "--page", str(tmp_path / "p.html")]) == 0
    assert json.loads(capsys.readouterr().out)["headline"]["proved"] is True


def test_foreign_and_missing_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main(["report", "--plan", str(tmp_path / "x.json")]) == 2
    assert main(["report", "--plan", str(tmp_path / "none.json")]) == 2
    assert "not a plan of this tool" in capsys.readouterr().err


def test_report_needs_neither_torch_nor_ortools(plan_file: Path) -> None:
    code = (
        "import sys; from mindspeed_autoparallel.cli.main import main; "
        f"code = main(['report', '--plan', {str(plan_file)!r}]); "
        "print(code, sorted({'torch', 'ortools', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
