"""data.json of MindSpeed-MM and its records, each decoded only to compute its sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from mindspeed_autoparallel.data.media import MediaSizes
from mindspeed_autoparallel.data.sizes import SampleSizes, text_counter
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_as, read_bytes, shown

SizeOf = Callable[[str, dict[str, object]], SampleSize]
"""(name, record) -> its sizes; ``ConfigError`` without the name if it is broken."""
MAX_RECORD_BYTES = 16 * 2**30
"""Most bytes of one file of records."""


_WAYS_OUT = {
    "vace": "It is read to extract features: give the data.json of the training, which reads these (feature).",
    "bagel": "Its loader packs samples to max_num_tokens: plan for sequences of that length, without data.",
}
"""Advice for MindSpeed-MM's data set types whose samples do not differ in training."""


T = TypeVar("T")


class DataFile(msgspec.Struct, Generic[T]):
    """A data.json of MindSpeed-MM."""

    dataset_param: T


def read_data_file(file: Path, kind: type[T]) -> T:
    """Return ``dataset_param`` of a data.json; raises ``ConfigError`` for other values than ``kind`` has."""
    return read_as(file, "data description (--mm-data)", DataFile[kind]).dataset_param  # type: ignore[valid-type]


class _Preprocess(msgspec.Struct):
    model_name_or_path: str | None = None
    image_min_pixels: int = 0
    image_max_pixels: int = 1280 * 28 * 28


class _Basic(msgspec.Struct):
    dataset: str | None = None
    dataset_dir: str = "."
    max_samples: int | None = None


class _Attributes(msgspec.Struct):
    images: str | None = None
    audios: str | None = None
    videos: str | None = None
    messages: str | None = None
    role_tag: str | None = None
    content_tag: str | None = None


_NAMES = {"role_tag": "role", "content_tag": "content", "messages": "messages"}
_NAMES |= {kind: kind for kind in ("images", "audios", "videos")}
"""Names of a record's parts if data.json gives none."""


class _Parameters(msgspec.Struct):
    dataset_type: str = "huggingface"
    preprocess_parameters: _Preprocess = msgspec.field(default_factory=_Preprocess)
    basic_parameters: _Basic = msgspec.field(default_factory=_Basic)
    attr: _Attributes = msgspec.field(default_factory=_Attributes)


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """The location and format of a data set's records; see data.json of MindSpeed-MM."""

    files: tuple[Path, ...]
    folder: Path
    tokenizer: str | None
    min_pixels: int
    max_pixels: int
    max_samples: int | None
    names: Mapping[str, str]
    """Key of ``attr`` in data.json -> the name in a record."""


def read_format(file: Path) -> RecordFormat:
    """Read ``file``, a data.json; raises ``ConfigError`` for invalid values or an unsupported data set type."""
    parameters = read_data_file(file, _Parameters)
    prepare, basic = parameters.preprocess_parameters, parameters.basic_parameters
    listed = [Path(name.strip()) for name in (basic.dataset or "").split(",") if name.strip()]
    if parameters.dataset_type != "huggingface" or not listed:
        raise ConfigError(
            f"{file}: dataset_type {shown(parameters.dataset_type)} with {len(listed)} files in "
            "basic_parameters.dataset; records in the mllm format (huggingface), multimodal, t2v and feature are read. "
            f"{_WAYS_OUT.get(parameters.dataset_type, 'For other data sets give the lengths: --lengths FILE.')}"
        )
    if not 0 <= prepare.image_min_pixels <= prepare.image_max_pixels or prepare.image_max_pixels < 1:
        raise ConfigError(
            f"{file}: image_min_pixels {prepare.image_min_pixels} and image_max_pixels {prepare.image_max_pixels} "
            "leave no size for an image."
        )
    return RecordFormat(
        files=tuple(listed),
        folder=Path(basic.dataset_dir),
        tokenizer=prepare.model_name_or_path or None,
        min_pixels=prepare.image_min_pixels,
        max_pixels=prepare.image_max_pixels,
        max_samples=basic.max_samples,
        names={key: getattr(parameters.attr, key) or usual for key, usual in _NAMES.items()},
    )


@dataclass(frozen=True, kw_only=True)
class RecordSet:
    """All records of a data set, still encoded."""

    records: tuple[tuple[str, bytes], ...] = field(repr=False)
    """(name for messages, JSON)."""
    sha256: str
    """Hash of the files of records, without pictures and audio."""


def read_record_set(data: RecordFormat) -> RecordSet:
    """Read the files of records: a JSON list, or a record in each line of a ``.jsonl``; ``ConfigError`` names the
    file."""
    found = read_records(data.files)
    return RecordSet(records=found.records[: data.max_samples], sha256=found.sha256)


def read_records(files: Sequence[Path]) -> RecordSet:
    """Read files of records like ``read_record_set``, without checking their contents."""
    digest, records = hashlib.sha256(), []
    for file in files:
        content = read_bytes(file, "data set", MAX_RECORD_BYTES)
        digest.update(content)
        try:
            if file.suffix == ".jsonl":
                found = [line for line in content.splitlines() if line.strip()]
            else:
                found = [bytes(raw) for raw in msgspec.json.decode(content, type=list[msgspec.Raw])]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"data set {file} must be a list of records: {error}.") from error
        records += [(f"{file}[{index}]", raw) for index, raw in enumerate(found)]
    if not records:
        raise ConfigError(f"the data sets {', '.join(map(str, files))} have no records.")
    return RecordSet(records=tuple(records), sha256=digest.hexdigest())


class ChatRecords:
    """The records of one data.json of this kind, and the size of each as in the reference training's samples."""

    def __init__(self, data: RecordFormat, model: MediaSizes) -> None:
        self._data, self._model = data, model
        self.files, self.records = data.files, read_record_set(data)
        self.settings = (data.min_pixels, data.max_pixels, data.tokenizer, data.folder)
        """The values of data.json that affect sizes."""

    def counting(self, bytes_per_token: float, seq_length: int) -> tuple[SizeOf, str]:
        """Return the function for the size of a record, and a description of the token count."""
        count, tokens_by = text_counter(self._data.tokenizer, bytes_per_token)
        sizes = SampleSizes(self._model, (self._data.min_pixels, self._data.max_pixels), count, seq_length)

        def size_of(name: str, record: dict[str, object]) -> SampleSize:
            turns = self._turns(record)
            files = [self._files(record, self._data.names[kind]) for kind in ("images", "audios", "videos")]
            if files[2]:
                raise ConfigError("it has videos, whose sizes are not read. Give the lengths: --lengths FILE.")
            self._check_marks(turns, files)
            return sizes.of(turns, files[0], files[1])

        return size_of, tokens_by

    def _turns(self, record: dict[str, object]) -> list[tuple[str, str]]:
        listed, role, content = (self._data.names[key] for key in ("messages", "role_tag", "content_tag"))
        messages = record.get(listed)
        if not isinstance(messages, list):
            raise ConfigError(f"a record needs a list {listed!r} of messages.")
        turns: list[Any] = [
            (one.get(role), one.get(content)) if isinstance(one, dict) else (None, None) for one in messages
        ]
        if not all(isinstance(role, str) and isinstance(text, str) for role, text in turns):
            raise ConfigError(f"a message needs the strings {role!r} and {content!r}.")
        return turns

    def _files(self, record: dict[str, object], key: str) -> list[Path]:
        listed = record.get(key) or []
        listed = [listed] if isinstance(listed, str) else listed
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise ConfigError(f"{key!r} must be a list of file names.")
        return [self._data.folder / item for item in listed]

    def _check_marks(self, turns: Sequence[tuple[str, str]], files: Sequence[Sequence[Path]]) -> None:
        encoders = (self._model.patch_size, self._model.audio_window)
        for kind, found, has_encoder in zip(("image", "audio"), files, encoders, strict=False):
            marks = sum(text.count(f"<{kind}>") for _, text in turns)
            if marks != len(found):
                raise ConfigError(f"{marks} <{kind}> marks in the messages, but {len(found)} files for them.")
            if found and not has_encoder:
                raise ConfigError(f"it has {kind} files, but model.json has no {kind}_encoder.")


def refuse_other_records(file: Path, sha256: str, mm_data: Path) -> None:
    """Raise ``ConfigError`` if ``file``, of the records ``sha256``, was not made from the records of ``mm_data``."""
    found = read_record_set(read_format(mm_data)).sha256
    if found != sha256:
        raise ConfigError(
            f"{file} has other records (sha256 {sha256[:12]}) than {mm_data} ({found[:12]}). Describe the data again."
        )
