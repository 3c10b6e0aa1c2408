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


@pytest.mark.parametrize(
    ("name", "text", "code", "said"),
    [
        ("config.json", "{}", 2, "config.json is not a launch script"),
        ("missing.sh", None, 2, "missing.sh"),
        ("broken.yaml", "a: [1", 1, "broken.yaml"),
        ("other.yaml", "a: 1\n", 1, "no section 'parallel'"),
        ("llm.yaml", "parallel:\n  fsdp_size: 8\n  fsdp_modules: [a]\n", 0, "is a file of MindSpeed-LLM"),
        (
            "arrays.sh",
            "A=(--tensor-model-parallel-size 3)\ntorchrun --nproc-per-node 8 t.py ${A[@]}\n",
            1,
            "TP 3 x PP 1",
        ),
    ],
)
def test_a_wrong_script_in_each_form_ends_with_a_line(tmp_path, capsys, name, text, code, said) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["doctor", "--script", str(tmp_path / name)]) == code
    output = capsys.readouterr()
    assert said in (output.err if code == 2 else output.out)
    assert "Traceback" not in output.err
