"""The same samples as parquet, Arrow, CSV, JSON lines and WebDataset tars have the same sizes."""

import csv
import io
import json
import re
import tarfile

import pytest

from mindspeed_autoparallel.cli.main import main

pytest.importorskip("PIL")
ROWS = [
    {"text": "a picture of a cat", "picture": (56, 84)},
    {"text": "no picture", "picture": None},
    {"text": "two words more than that", "picture": (112, 112)},
]
SIZES = [
    {"tokens": 17, "patches": 24, "images": 2, "seconds": 1.5},
    {"tokens": 5, "patches": 0, "images": 0, "seconds": 0},
]
MODEL = {"image_encoder": {"vision_encoder": {"patch_size": 14, "spatial_merge_size": 2}}}


def picture(size):
    from PIL import Image

    made = io.BytesIO()
    Image.new("RGB", (size[1], size[0])).save(made, "PNG")
    return made.getvalue()


def stored(row):
    return {"text": row["text"], "image": row["picture"] and {"bytes": picture(row["picture"]), "path": None}}


def as_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([stored(row) for row in ROWS]), folder / "train.parquet")
    return folder / "train.parquet"


def as_cache(folder):
    pyarrow = pytest.importorskip("pyarrow")
    (folder / "cache").mkdir()
    (folder / "cache" / "dataset_info.json").write_text("{}")
    for number, rows in enumerate((ROWS[:1], ROWS[1:])):
        table = pyarrow.Table.from_pylist([stored(row) for row in rows])
        with (
            pyarrow.OSFile(str(folder / "cache" / f"data-{number}.arrow"), "wb") as sink,
            pyarrow.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
    return folder / "cache"


def as_tar(folder):
    with tarfile.open(folder / "shard-0000.tar", "w") as made:
        for number, row in enumerate(ROWS):
            parts = {"txt": row["text"].encode(), **({"png": picture(row["picture"])} if row["picture"] else {})}
            for ending, content in parts.items():
                member = tarfile.TarInfo(f"{number:05d}.{ending}")
                member.size = len(content)
                made.addfile(member, io.BytesIO(content))
    return folder / "shard-0000.tar"


def as_lines(folder):
    for number, row in enumerate(ROWS):
        if row["picture"]:
            (folder / f"{number}.png").write_bytes(picture(row["picture"]))
    told = [
        {
            "conversations": [{"from": "user", "value": row["text"]}],
            "image": str(folder / f"{number}.png") if row["picture"] else None,
        }
        for number, row in enumerate(ROWS)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, told)))
    return folder / "rows.jsonl"


def described(capsys, folder, *words):
    (folder / "model.json").write_text(json.dumps(MODEL))
    out = folder / "distribution.json"
    code = main(["data", "describe", *map(str, words), "--output", str(out), "--overwrite"])
    assert code == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]], found["source"]


@pytest.mark.parametrize("make", [as_parquet, as_cache, as_tar, as_lines])
def test_rows_with_pictures_have_the_sizes_of_their_headers(make, tmp_path, capsys):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    rows, source = described(capsys, tmp_path, "--table", make(tmp_path), "--mm-model", tmp_path / "model.json")
    # Patches of 14 pixels, four of which are one token, with two marks around; text and turn by bytes.
    turn = len(b"user\n") + len(b"\n") + 2
    expected = []
    for row, patches in zip(ROWS, (4 * 6, 0, 8 * 8), strict=True):
        tokens = turn + len(row["text"]) + (patches // 4 + 2 if patches else 0)
        expected.append((tokens, int(patches > 0), patches, patches**2))
    found = [(row["tokens"], row["images"], row["patches"], row["squared_patches"]) for row in rows]
    assert found == sorted(expected) and source["kind"] == "table" and source["num_records"] == 3


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_columns_of_sizes_are_used_unchanged(ending, tmp_path, capsys):
    file = tmp_path / f"lengths.{ending}"
    if ending == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(SIZES), file)
    elif ending == "jsonl":
        file.write_text("\n".join(map(json.dumps, SIZES)))
    else:
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, list(SIZES[0]), delimiter="," if ending == "csv" else "\t")
            writer.writeheader()
            writer.writerows(SIZES)
    rows, _ = described(capsys, tmp_path, "--table", file)
    assert rows[1] == {
        "tokens": 17,
        "images": 2,
        "patches": 24,
        "squared_patches": 288,
        "clips": 1,
        "frames": 150,
        "squared_frames": 22500,
    }
    assert rows[0]["tokens"] == 5 and sum(rows[0].values()) == 5


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"sound": 3}', "it has the columns sound; a column of tokens"),
        ("a.jsonl", '{"tokens": -3}', r"a\.jsonl\[0\]: tokens -3 is not a number of at least 0"),
        ("a.jsonl", '{"tokens": "nan"}', "tokens nan is not a number"),
        ("a.jsonl", '{"tokens": 2.5}', "tokens 2.5 is not a whole number"),
        ("a.jsonl", "{", "cannot read .*a.jsonl"),
        ("a.jsonl", '{"text": "x", "image": "a.png"}', r"a\.jsonl\[0\]: it has images; their patches need"),
        ("a.jsonl", '{"text": "x", "mp4": "a.mp4"}', "it has videos"),
        ("a.parquet", "not parquet", "cannot read .*a.parquet"),
        ("a.tar", "not a tar", "cannot read .*a.tar"),
        ("a.txt", "1", "is not a table or a folder of tables"),
    ],
)
def test_unreadable_tables_are_refused_in_one_line(name, content, words, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    assert main(["data", "describe", "--table", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error) and error.count("\n") == 1, error


@pytest.mark.parametrize(
    "words",
    [
        ["--lengths", "{}/l.txt", "--bytes-per-token", "4"],
        ["--lengths", "{}/l.txt", "--skip-broken"],
        ["--lengths", "{}/l.txt", "--seed", "3"],
        ["--lengths", "{}/l.txt", "--overwrite"],
        ["--lengths", "{}/l.txt", "--tokenizer", "folder"],
    ],
)
def test_flags_without_effect_are_refused(words, tmp_path, capsys):
    (tmp_path / "l.txt").write_text("3\n4\n")
    assert main(["data", "describe", *(word.format(tmp_path) for word in words)]) == 2
    assert "has no effect with this kind of data" in capsys.readouterr().err


def prepared(folder, split, name="split.yaml"):
    """Four tars of one sample each, of 10, 20, 30 and 40 tokens, and the split that Energon's own tool writes."""
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta" / name).write_text(split)
    for number in range(4):
        with tarfile.open(folder / f"shard-{number:02d}.tar", "w") as made:
            member = tarfile.TarInfo("a.txt")
            member.size = 10 * (number + 1)
            made.addfile(member, io.BytesIO(b"x" * member.size))
    return folder


@pytest.mark.parametrize(
    ("split", "name", "tokens"),
    [
        ("split_parts:\n  train:\n  - shard-{00..01}.tar\n  val:\n  - shard-{02..03}.tar\nexclude: []\n", "split.yaml", [10, 20]),
        ("split_parts: {train: ['shard-{00,03}.tar', shard-02.tar]}\nexclude: ['shard-0{0..1}.tar']\n", "split.yaml", [40, 30]),
        ('{"split_parts": {"train": ["shard-0{1..2}.tar"]}}', "split.json", [20, 30]),
    ],
)  # fmt: skip
def test_the_training_part_of_an_energon_data_set_is_read(split, name, tokens, tmp_path, capsys):
    folder = prepared(tmp_path, split, name)
    rows, source = described(capsys, tmp_path, "--table", folder)
    assert source["num_records"] == 2
    turn = len(b"user\n") + len(b"\n") + 2
    assert sorted(row["tokens"] for row in rows) == sorted(turn + count for count in tokens)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("split_parts: {val: [shard-00.tar]}", "needs lists of names"),
        ("split_parts: {train: [shard-00.tar]}\nexclude: [shard-00.tar]", "leaves no tar"),
        ("split_parts: {train: [shard-00.tar]}\nexclude: [shard-00.tar/a]", "excludes 1 samples"),
        ("split_parts: {train: ['shard-{00..09}.tar']}", "names 6 tars that"),
        ("split_parts: {train: ['{0..999999999999}.tar']}", "more than 1000000 tars"),
        ("split_parts: {train: ['{x}.tar']}", "is not a pattern"),
        ("split_parts: {train: ['{3..0}.tar']}", "is not a pattern"),
        ("split_parts: {train: ['{a,b{0..2}}.tar']}", "is not a pattern"),
        ("split_parts: [", "is not valid YAML"),
        ("- a", "needs lists of names"),
    ],
)
def test_a_split_of_energon_that_cannot_be_followed_is_refused(split, words, tmp_path, capsys):
    folder = prepared(tmp_path, split)
    assert main(["data", "describe", "--table", str(folder), "--output", str(tmp_path / "d.json")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "d.json").exists()
