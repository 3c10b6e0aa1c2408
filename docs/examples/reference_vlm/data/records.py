"""Records of the mllm format: messages with ``<image>`` and ``<audio>`` marks, and the files of these marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json
from reference_vlm.configuration import DataDescription

IMAGE_MARK, AUDIO_MARK = "<image>", "<audio>"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One conversation. ``name``: its origin; ``turns``: (role, text)."""

    name: str
    turns: tuple[tuple[str, str], ...]
    images: tuple[Path, ...]
    audios: tuple[Path, ...]


def read_records(data: DataDescription) -> list[Record]:
    """Return all records of all files, at most ``max_samples`` of them; ``ConfigError`` names a record that is
    broken."""
    records: list[Record] = []
    for file in data.files:
        values = read_json(file, "data set")
        if not isinstance(values, list):
            raise ConfigError(f"data set {file} must be a list of records, not {type(values).__name__}.")
        for index, value in enumerate(values):
            if data.max_samples is not None and len(records) == data.max_samples:
                return records
            records.append(_record(value, f"{file}[{index}]", data))
    if not records:
        raise ConfigError(f"{data.file}: the data sets {', '.join(map(str, data.files))} have no records.")
    return records


def split_records(records: Sequence[Record], val_rate: float) -> tuple[Sequence[Record], Sequence[Record]]:
    """Return records to train on and, from the end, records to evaluate on; neither is empty unless the rate is 0."""
    count = max(1, round(len(records) * val_rate)) if val_rate else 0
    if count and count == len(records):
        raise ConfigError(f"val_rate {val_rate} leaves none of {len(records)} records to train on; add records.")
    return records[: len(records) - count], records[len(records) - count :]


def _record(value: Any, name: str, data: DataDescription) -> Record:
    if not isinstance(value, Mapping) or not isinstance(value.get(data.messages_key), list):
        raise ConfigError(f"{name}: a record needs a list {data.messages_key!r} of messages.")
    turns = []
    for message in value[data.messages_key]:
        role, text = (
            (message.get(data.role_tag), message.get(data.content_tag)) if isinstance(message, Mapping) else (0, 0)
        )
        if not isinstance(role, str) or not isinstance(text, str):
            raise ConfigError(f"{name}: a message needs the strings {data.role_tag!r} and {data.content_tag!r}.")
        turns.append((role, text))
    record = Record(
        name=name,
        turns=tuple(turns),
        images=_files(value, data.images_key, name, data.folder),
        audios=_files(value, data.audios_key, name, data.folder),
    )
    for mark, files in ((IMAGE_MARK, record.images), (AUDIO_MARK, record.audios)):
        marks = sum(text.count(mark) for _, text in turns)
        if marks != len(files):
            raise ConfigError(f"{name}: {marks} {mark} marks in the messages, but {len(files)} files for them.")
    return record


def _files(value: Mapping[str, object], key: str, name: str, folder: Path) -> tuple[Path, ...]:
    listed = value.get(key) or []
    listed = [listed] if isinstance(listed, str) else listed
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise ConfigError(f"{name}: {key!r} must be a list of file names.")
    return tuple(folder / item for item in listed)
