"""``data llava-to-mllm``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_autoparallel.cli.main import main

GOOD: dict[str, Any] = {
    "id": "1",
    "image": "a.png",
    "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}],
}
BROKEN: list[Any] = [
    {**GOOD, "image": "missing.png"},
    {**GOOD, "image": "x" * 3000},
    {**GOOD, "conversations": []},
    {**GOOD, "conversations": GOOD["conversations"][:1]},
    {**GOOD, "conversations": [{"from": "human", "value": "no mark"}, {"from": "gpt", "value": "A cat."}]},
    {**GOOD, "conversations": [{"from": "nobody", "value": "x"}]},
    "not a record",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(b"")
    return tmp_path


def _convert(folder: Path, sets: list[list[Any]], *flags: str) -> int:
    sources = []
    for number, records in enumerate(sets):
        (folder / f"set{number}.json").write_text(json.dumps(records))
        sources.append(str(folder / f"set{number}.json"))
    return main(
        ["data", "llava-to-mllm", *sources, "--images", str(folder), "--output", str(folder / "out.json"), *flags]
    )


def test_several_sets_become_one_in_the_mllm_format(folder: Path) -> None:
    text_only = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    assert _convert(folder, [[GOOD], [text_only, GOOD]]) == 0
    records = json.loads((folder / "out.json").read_text())
    assert [len(record["images"]) for record in records] == [1, 0, 1]
    assert records[0]["images"] == [str(folder / "a.png")]
    assert records[0]["messages"] == [
        {"role": "user", "content": "<image>\nWhat?"},
        {"role": "assistant", "content": "A cat."},
    ]


def test_broken_records_are_skipped_and_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _convert(folder, [[*BROKEN, GOOD]]) == 0
    assert len(json.loads((folder / "out.json").read_text())) == 1
    errors = capsys.readouterr().err
    for index in range(len(BROKEN)):
        assert f"set0.json[{index}]" in errors
    assert "missing.png" in errors


@pytest.mark.parametrize("record", BROKEN)
def test_strict_refuses_and_writes_nothing(folder: Path, record: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert _convert(folder, [[GOOD, record]], "--strict") == 2
    assert "set0.json[1]" in capsys.readouterr().err
    assert not (folder / "out.json").exists()


def test_max_samples_counts_good_records(folder: Path) -> None:
    assert _convert(folder, [[BROKEN[0], GOOD, GOOD], [GOOD]], "--max-samples", "2") == 0
    assert len(json.loads((folder / "out.json").read_text())) == 2


def test_an_existing_file_is_kept_without_overwrite(folder: Path) -> None:
    (folder / "out.json").write_text("mine")
    assert _convert(folder, [[GOOD]]) == 2
    assert (folder / "out.json").read_text() == "mine"
    assert _convert(folder, [[GOOD]], "--overwrite", "--json") == 0
