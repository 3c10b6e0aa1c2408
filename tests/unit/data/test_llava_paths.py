"""Records that cannot be carried over are named, and pictures are found by a reader that puts dataset_dir in front."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_autoparallel.cli.main import main

TURNS = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data" / "coco"
    folder.mkdir(parents=True)
    (folder / "a.png").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def converted(records: list[object], output: str) -> int:
    Path("llava.json").write_text(json.dumps(records))
    return main(["data", "llava-to-mllm", "llava.json", "--images", "data/coco", "--output", output])


@pytest.mark.parametrize("output", ["data/mllm.json", "mllm.json"])
def test_dataset_dir_and_the_path_of_a_picture_meet_once(data: Path, output: str):
    assert converted([{"image": "a.png", "conversations": TURNS}], output) == 0
    record = json.loads(Path(output).read_text())[0]
    assert (Path(output).parent / record["images"][0]).is_file()


def test_pictures_that_lie_elsewhere_are_named_in_full(data: Path):
    Path("other").mkdir()
    assert converted([{"image": "a.png", "conversations": TURNS}], "other/mllm.json") == 0
    assert json.loads(Path("other/mllm.json").read_text())[0]["images"] == [str(data / "coco" / "a.png")]


def test_a_video_is_not_dropped_without_a_word(data: Path, capsys: pytest.CaptureFixture[str]):
    records = [
        {"video": "a.mp4", "conversations": [{"from": "human", "value": "What?"}, TURNS[1]]},
        {"image": "a.png", "conversations": TURNS},
    ]
    assert converted(records, "mllm.json") == 0
    assert len(json.loads(Path("mllm.json").read_text())) == 1
    assert "llava.json[0]: a video" in capsys.readouterr().err
