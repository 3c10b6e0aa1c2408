"""LLaVA-instruct records -> the mllm format (needs no torch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json, shown

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_MARK = "<image>"


@dataclass(frozen=True)
class Conversion:
    """``records`` in the mllm format; ``broken``: one line per skipped record."""

    records: list[dict[str, object]]
    broken: list[str]


class _BrokenRecord(Exception):
    """The reason why a record cannot be used."""


def convert(
    sources: Sequence[Path],
    images: Path,
    *,
    folder: Path = Path(),
    max_samples: int | None = None,
    strict: bool = False,
) -> Conversion:
    """Read ``sources`` one after another until ``max_samples`` records are good.

    Pictures must exist under ``images``; relative paths are written relative to ``folder``, which will be the data
    set's dataset_dir. ``strict``: the first broken record is ``ConfigError`` instead of being left out.
    """
    if not images.is_dir():
        raise ConfigError(f"--images {images} is not a folder; give the folder that holds the images.")
    records: list[dict[str, object]] = []
    broken: list[str] = []
    for name, value in _all_records(sources):
        if max_samples is not None and len(records) == max_samples:
            break
        try:
            records.append(_convert_one(value, images, folder))
        except _BrokenRecord as reason:
            if strict:
                raise ConfigError(
                    f"{name}: {reason}. Repair it, or remove --strict to skip broken records."
                ) from reason
            broken.append(f"{name}: {reason}")
    if not records:
        raise ConfigError(f"no usable record in {', '.join(map(str, sources))} ({len(broken)} broken).")
    return Conversion(records, broken)


def _all_records(sources: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    for source in sources:
        values = read_json(source, "LLaVA-instruct data set")
        if not isinstance(values, list):
            raise ConfigError(f"{source} must be a list of LLaVA-instruct records, not {type(values).__name__}.")
        for index, value in enumerate(values):
            label = f" (id {value['id']})" if isinstance(value, Mapping) and "id" in value else ""
            yield f"{source}[{index}]{label}", value


def _convert_one(value: Any, images: Path, folder: Path) -> dict[str, object]:
    if not isinstance(value, Mapping) or not isinstance(value.get("conversations"), list) or not value["conversations"]:
        raise _BrokenRecord("no 'conversations'")
    messages = []
    for turn in value["conversations"]:
        role = _ROLES.get(str(turn.get("from"))) if isinstance(turn, Mapping) else None
        if role is None or not isinstance(turn.get("value"), str) or not turn["value"].strip():
            raise _BrokenRecord("a turn without a known 'from' (human, gpt) or without text in 'value'")
        messages.append({"role": role, "content": turn["value"]})
    if messages[-1]["role"] != "assistant":
        raise _BrokenRecord("no answer: the last turn is not by 'gpt'")
    if value.get("video"):
        raise _BrokenRecord("a video, which this conversion does not support")
    listed = value.get("image") or []
    names = [listed] if isinstance(listed, str) else listed
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _BrokenRecord("'image' is neither a file name nor a list of them")
    marks = sum(message["content"].count(_MARK) for message in messages)
    if marks != len(names):
        raise _BrokenRecord(f"{marks} {_MARK} marks for {len(names)} images")
    for name in names:
        if not _is_file(images / name):
            raise _BrokenRecord(f"no image {shown(images / name, 200)}")
    return {"messages": messages, "images": [str(_seen_from(folder, images / name)) for name in names]}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _seen_from(folder: Path, picture: Path) -> Path:
    """Return ``picture`` relative to ``folder``, which readers with that dataset_dir prepend to relative paths."""
    if picture.is_absolute():
        return picture
    there, here = picture.resolve(), folder.resolve()
    return there.relative_to(here) if there.is_relative_to(here) else there
