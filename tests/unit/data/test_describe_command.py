"""``data describe``: its output, its files and its refusals."""

from __future__ import annotations

import json
import re
import struct
import wave
from pathlib import Path
from typing import Any

import numpy
import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.data.distribution import Distribution

pytest.importorskip("PIL")

ROOT = Path(__file__).parents[3]
MODEL = {
    "image_encoder": {"vision_encoder": {"patch_size": 14, "spatial_merge_size": 2}},
    "audio_encoder": {"audio_encoder": {"n_window": 100}},
    "text_decoder": {"max_position_embeddings": 400},
}


def record(text: str = "hi", images: tuple[str, ...] = (), audios: tuple[str, ...] = ()) -> dict[str, Any]:
    marks = "<image>" * len(images) + "<audio>" * len(audios)
    return {"messages": [{"role": "user", "content": marks + text}], "images": list(images), "audios": list(audios)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from PIL import Image

    Image.new("RGB", (56, 84)).save(tmp_path / "tall.png")
    Image.new("RGB", (1120, 30)).save(tmp_path / "wide.png")
    (tmp_path / "no.png").write_bytes(b"not a picture")
    with wave.open(str(tmp_path / "tone.wav"), "wb") as tone:
        tone.setnchannels(1)
        tone.setsampwidth(2)
        tone.setframerate(8000)
        tone.writeframes(b"\0\0" * 8000)
    return tmp_path


def describe(folder: Path, records: list[Any], *flags: str, model: object = None) -> int:
    (folder / "set.json").write_text(json.dumps(records))
    (folder / "model.json").write_text(json.dumps(MODEL if model is None else model))
    basic = {"dataset": str(folder / "set.json"), "dataset_dir": str(folder)}
    prepare = {"image_min_pixels": 0, "image_max_pixels": 200 * 28 * 28, "model_name_or_path": None}
    parameters = {"basic_parameters": basic, "preprocess_parameters": prepare, "attr": {"audios": "audios"}}
    (folder / "data.json").write_text(json.dumps({"dataset_param": parameters}))
    files = ["--mm-data", str(folder / "data.json"), "--mm-model", str(folder / "model.json")]
    return main(["data", "describe", *files, *flags])


def test_sizes_are_those_of_the_formulas(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out.json"
    records = [record("hello"), record("ab", ("tall.png", "wide.png"), ("tone.wav",)), record("hello")]
    assert describe(folder, records, "--output", str(out), "--page", str(folder / "page.html")) == 0
    data = Distribution.read(out)
    # A turn: its two marks, "user\n", the text, "\n". Pictures of 6 x 4 and 2 x 80 patches, one second of audio.
    by_tokens = dict(zip(data.weights, data.rows, strict=True))
    assert by_tokens[2] == (2 + 5 + 5 + 1, 0, 0, 0, 0, 0, 0)
    text, pictures, audio = 2 + 5 + 2 + 1, (24 // 4 + 2) + (160 // 4 + 2), 25 + 2
    assert by_tokens[1] == (text + pictures + audio, 2, 184, 24**2 + 160**2, 1, 100, 100**2)
    printed = capsys.readouterr()
    assert "3 samples, all read" in printed.out and "patches" in printed.out
    page = (folder / "page.html").read_text()
    assert page.count("<svg") == 8 and "correlation" in page


def test_it_reads_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--output", str(folder / "out.json"))
    records = [record("a", ("tall.png",)), record("a", (), ("tone.wav",))]
    assert describe(folder, records, *flags) == 0
    (folder / "tall.png").unlink()
    assert describe(folder, records, *flags) == 0
    assert "is up to date" in capsys.readouterr().err
    # Another data set is read, and needs leave to replace the file.
    assert describe(folder, [record("other")], *flags) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert describe(folder, [record("other")], *flags, "--overwrite") == 0
    assert Distribution.read(folder / "out.json").source.num_records == 1


def test_a_sample_of_the_records_has_intervals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record("x" * (index % 97)) for index in range(500)]
    assert describe(folder, records, "--max-read", "100", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    mean = found["summary"][0]["mean"]
    true = 8 + sum(index % 97 for index in range(500)) / 500
    assert mean["low"] < true < mean["high"] and mean["high"] - mean["low"] < 20
    assert found["source"]["num_read"] == 100


@pytest.mark.parametrize(
    ("records", "flags", "words"),
    [
        ([record("a", ("gone.png",))], (), r"\[0\]: cannot read the image .*gone.png"),
        ([record(), record("a", ("no.png",))], (), r"\[1\]: cannot read the image .*no.png.*--skip-broken"),
        ([record("a", (), ("no.png",))], (), "cannot read the audio"),
        ([{"messages": [{"role": "user", "content": "<image>"}]}], (), "1 <image> marks .* 0 files"),
        ([{"messages": "no"}], (), "needs a list 'messages'"),
        ([{"messages": [{"role": 1, "content": "x"}]}], (), "needs the strings"),
        ([{**record(), "videos": ["a.mp4"]}], (), r"videos, whose sizes are not read.*--lengths"),
        ([record("x" * 500)], (), r"1 of 1 samples .*max_position_embeddings 400.*508 tokens"),
        ([record("x" * 500)], ("--seq-length", "500"), "above max_position_embeddings 400"),
        ([record("x", ("wide.png",))], ("--seq-length", "20"), "beyond --seq-length 20"),
        ([], (), "have no records"),
        ({"a": 1}, (), "must be a list of records"),
        ([record("a", ("gone.png",))], ("--skip-broken",), "all 1 records are broken"),
        ([record()], ("--max-read", "-1"), "--max-read must not be negative"),
        ([record()], ("--bytes-per-token", "nan"), "--bytes-per-token"),
    ],
)
def test_bad_records_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], records: list[Any], flags: tuple[str, ...], words: str
) -> None:
    assert describe(folder, records, *flags) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(words, line), line


def test_broken_records_can_be_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record("a", ("gone.png",)), record("text"), record("b", ("no.png",))]
    assert describe(folder, records, "--skip-broken", "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["source"]["num_broken"] == 2
    assert printed.err.count("skipped ") == 2 and "no record has images" in printed.err


def test_a_model_without_the_encoder_refuses_its_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe(folder, [record("a", ("tall.png",))], model={"text_decoder": {}}) == 2
    assert "model.json has no image_encoder" in capsys.readouterr().err


def test_tokens_can_be_estimated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe(folder, [record("x" * 40)], "--bytes-per-token", "4") == 0
    printed = capsys.readouterr().out
    assert "an estimate: 4 bytes of UTF-8 per token" in printed
    # 40 bytes are 10 tokens; "user\n" 2, "\n" 1, the marks 2.
    assert re.search(r"tokens +15 ", printed)


@pytest.mark.parametrize("name", ["lengths.txt", "lengths.json", "lengths.npy"])
def test_lists_of_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    lengths, file = [5, 7, 7, 4000], tmp_path / name
    if name.endswith("npy"):
        numpy.save(file, numpy.array(lengths))
    else:
        file.write_text(json.dumps(lengths) if name.endswith("json") else "\n".join(map(str, lengths)) + "\n\n")
    assert (
        main(["data", "describe", "--lengths", str(file), "--seq-length", "1000", "--output", str(tmp_path / "o")]) == 0
    )
    data = Distribution.read(tmp_path / "o")
    assert [row[0] for row in data.rows] == [5, 7, 1000] and data.weights == (1, 2, 1) and data.source.num_cut == 1
    assert "1 texts cut at 1000 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5\nNaN\n", "line 2: NaN is not a number of tokens"),
        ("5\n0\n", "line 2: 0 is not a number"),
        ("5\n2.5\n", "line 2: 2.5 is not a number"),
        ("5\ninf\n", "line 2: inf is not a number"),
        ("5\nfive\n", "line 2: five is not a number"),
        ("\n", "is empty"),
    ],
)
def test_bad_lengths_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    (tmp_path / "l.txt").write_text(text)
    assert main(["data", "describe", "--lengths", str(tmp_path / "l.txt")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line


def test_documents_of_an_index_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, ends = [3, 4, 5, 6], [0, 2, 2, 4]  # the second document is empty
    content = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, len(lengths), len(ends))
    content += numpy.array(lengths, numpy.int32).tobytes() + bytes(8 * len(lengths)) + numpy.array(ends).tobytes()
    (tmp_path / "set.idx").write_bytes(content)
    assert main(["data", "describe", "--indexed", str(tmp_path / "set"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"]["num_records"] == 2 and found["summary"][0]["largest"] == 11
    for broken, words in ((content[:-8], "bytes where version 1"), (b"x" * 50, "not a Megatron index file")):
        (tmp_path / "set.idx").write_bytes(broken)
        assert main(["data", "describe", "--indexed", str(tmp_path / "set")]) == 2
        assert words in capsys.readouterr().err


def test_exactly_one_kind_of_data_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "describe"]) == 2
    assert "give one of --mm-data, --lengths, --indexed and --table; none was given" in capsys.readouterr().err


def test_the_example_of_the_readme(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    example = Path("docs/examples/qwen2vl_tiny")
    flags = ["--mm-data", str(example / "data_audio.json"), "--mm-model", str(example / "model_audio.json")]
    assert main(["data", "describe", *flags]) == 0
    assert "frames" in capsys.readouterr().out
