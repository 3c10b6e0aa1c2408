"""Samples in tables and archives: parquet, Arrow (the cache of HF datasets), CSV, JSON lines, WebDataset tars."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.data.energon import training_tars
from mindspeed_autoparallel.data.media import MEL_HOP, MEL_RATE_HZ
from mindspeed_autoparallel.data.sizes import Media, SampleSizes
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ConfigError, first_line
from mindspeed_autoparallel.files import shown

Row = Mapping[str, object]
SUFFIXES = (".parquet", ".arrow", ".csv", ".tsv", ".jsonl", ".tar")
_TOKENS = ("tokens", "num_tokens", "length", "seq_len", "input_ids")
_TEXTS = ("text", "txt", "caption", "content")
_TURNS = ("messages", "conversations")
_PICTURES = ("image", "images", "jpg", "jpeg", "png", "webp")
_CLIPS = ("audio", "audios", "wav")
_VIDEOS = ("video", "videos", "mp4", "webm", "mov")
_SECONDS = ("seconds", "duration")
_SIZES = ("images", "patches", "squared_patches", "clips", "frames", "squared_frames")
_EDGE = 2**20


def table_files(path: Path) -> tuple[Path, ...]:
    """Return ``path``, or the tables and archives in a folder (such as a cache of HF datasets), in the order of names;
    for a data set prepared by Energon, the tars for training."""
    tars = training_tars(path)
    if tars is not None:
        return tuple(tars)
    found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES)
    if not found or any(each.suffix not in SUFFIXES for each in found):
        raise ConfigError(f"{path} is not a table or a folder of tables: {', '.join(SUFFIXES)} are read.")
    return tuple(found)


def digest_of(files: Sequence[Path]) -> str:
    """Return a hash of names, sizes and both ends of ``files``, which may be too large to read completely."""
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as opened:
            first = opened.read(_EDGE)
            opened.seek(max(0, size - _EDGE))
            digest.update(repr((file.name, size)).encode() + first + opened.read(_EDGE))
    return digest.hexdigest()


def read_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Yield (name for messages, columns) of every sample; ``ConfigError`` for an unreadable file."""
    readers = {".parquet": _parquet, ".arrow": _arrow, ".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".tar": _tar}
    try:
        for index, row in enumerate(readers[file.suffix](file)):
            yield f"{file}[{index}]", row
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError(f"{file.suffix} files need the package pyarrow: pip install pyarrow.") from error
    except Exception as error:  # pyarrow, csv, json and tarfile raise any exception for a damaged file
        raise ConfigError(f"cannot read {file}: {first_line(error)}") from error


def size_of_row(row: Row, sizes: SampleSizes) -> SampleSize:
    """Return the sizes of one sample: from columns of sizes if there is one of tokens, otherwise from its text and
    media; ``ConfigError`` names what is missing."""
    tokens = next((row[key] for key in _TOKENS if row.get(key) is not None), None)
    if tokens is not None:
        return _of_columns(tokens, row)
    if any(row.get(key) for key in _VIDEOS):
        raise ConfigError("it has videos, whose rows depend on how training samples them: give a column of tokens.")
    pictures, clips = _media(row, _PICTURES), _media(row, _CLIPS)
    return sizes.of(_turns(row, len(pictures), len(clips)), pictures, clips)


def _of_columns(tokens: Any, row: Row) -> SampleSize:
    count = len(tokens) if isinstance(tokens, (list, tuple)) else _whole("tokens", tokens)
    if count < 1:
        raise ConfigError("it has no tokens.")
    found = {
        key: len(value) if isinstance(value, list) else _whole(key, value)
        for key in _SIZES
        if (value := row.get(key)) not in (None, "")
    }
    seconds = next((row[key] for key in _SECONDS if row.get(key) not in (None, "")), None)
    if seconds is not None and "frames" not in found:
        found["frames"] = int(_number("seconds", seconds) * MEL_RATE_HZ / MEL_HOP)
    for rows, items in (("patches", "images"), ("frames", "clips")):
        if found.get(rows):
            parts = found.setdefault(items, 1) or 1
            found.setdefault(f"squared_{rows}", found[rows] ** 2 // parts)  # as many in each
    return SampleSize(tokens=count, **found)


def _number(key: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number <= 2**40:
        raise ConfigError(f"{key} {shown(str(value), 40)} is not a number of at least 0.")
    return number


def _whole(key: str, value: Any) -> int:
    number = _number(key, value)
    if number != int(number):
        raise ConfigError(f"{key} {shown(str(value), 40)} is not a whole number.")
    return int(number)


def _turns(row: Row, num_pictures: int, num_clips: int) -> list[tuple[str, str]]:
    """Return the conversation, with a mark for each picture and clip, added if missing in the text."""
    listed = next((row[key] for key in _TURNS if row.get(key)), None)
    if isinstance(listed, list):
        turns = [
            (str(one.get("role") or one.get("from") or "user"), one.get("content") or one.get("value") or "")
            for one in listed
            if isinstance(one, Mapping)
        ]
        if len(turns) != len(listed) or not all(isinstance(text, str) for _, text in turns):
            raise ConfigError("a message needs a role (or from) and a text content (or value).")
    else:
        text = next((row[key] for key in _TEXTS if isinstance(row.get(key), str)), None)
        if text is None:
            known = ", ".join((*_TOKENS, *_TEXTS, *_TURNS))
            raise ConfigError(f"it has the columns {', '.join(map(str, row))}; a column of {known} is needed.")
        turns = [("user", text)]
    for kind, number in (("<image>", num_pictures), ("<audio>", num_clips)):
        missing = number - sum(text.count(kind) for _, text in turns)
        if missing < 0:
            raise ConfigError(f"{-missing} more {kind} marks than files.")
        turns[0] = (turns[0][0], kind * missing + turns[0][1])
    return turns


def _media(row: Row, keys: Sequence[str]) -> list[Media]:
    """Return files or their bytes from a path, bytes, or the form of HF datasets ({"bytes", "path"}), one or
    several."""
    found: list[Media] = []
    for key in keys:
        value = row.get(key)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping):
                one = one.get("bytes") or one.get("path")
            if isinstance(one, (bytes, bytearray)):
                found.append(bytes(one))
            elif isinstance(one, str) and one:
                found.append(Path(one))
    return found


def _parquet(file: Path) -> Iterator[Row]:
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        for batch in opened.iter_batches(batch_size=256):
            yield from batch.to_pylist()


def _arrow(file: Path) -> Iterator[Row]:
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        try:
            batches: Any = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            opened = pyarrow.ipc.open_file(source)
            batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
        for batch in batches:
            for start in range(0, batch.num_rows, 256):
                yield from batch.slice(start, 256).to_pylist()


def _csv(file: Path) -> Iterator[Row]:
    with file.open(newline="", encoding="utf-8-sig") as opened:
        yield from csv.DictReader(opened, delimiter="\t" if file.suffix == ".tsv" else ",")


def _jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as opened:
        for line in opened:
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"a line holds {shown(str(row), 40)}, not an object")
                yield row


def _tar(file: Path) -> Iterator[Row]:
    """Yield the members of one sample together: they share their name up to the first dot of its last part."""
    key = ""
    row: dict[str, object] = {}
    with tarfile.open(file, "r|") as opened:
        for member in opened:
            content = opened.extractfile(member) if member.isfile() else None
            if content is None:
                continue
            folder, _, last = member.name.rpartition("/")
            stem, _, ending = last.partition(".")
            if f"{folder}/{stem}" != key and row:
                yield row
                row = {}
            key = f"{folder}/{stem}"
            kind = ending.rpartition(".")[2].lower()
            data = content.read()
            if kind == "json":
                row.update(json.load(io.BytesIO(data)))
            else:
                row[kind] = data.decode() if kind in _TEXTS else data
    if row:
        yield row
