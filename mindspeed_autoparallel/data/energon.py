"""A data set prepared by Megatron Energon, whose split lists the tars for training."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import parse_yaml, read_json, read_text, shown

MOST_TARS = 1_000_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_NESTED = re.compile(r"\{[^}]*\{")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def training_tars(folder: Path) -> list[Path] | None:
    """Return the tars of the part ``train``, without those excluded; ``None`` if ``folder`` is not prepared.

    Raises ``ConfigError`` for a split that cannot be read, names tars that do not exist, or excludes single samples.
    """
    file = next((each for name in ("split.yaml", "split.json") if (each := folder / ".nv-meta" / name).is_file()), None)
    if file is None:
        return None
    split = _read(file)
    parts = split.get("split_parts") if isinstance(split, dict) else None
    names = _names(file, parts.get("train") if isinstance(parts, dict) else None)
    excluded = set(_names(file, split.get("exclude") or [] if isinstance(split, dict) else []))
    tars = [name for name in names if name not in excluded]
    if not tars:
        raise ConfigError(f"{file} leaves no tar in split_parts: train.")
    samples = [name for name in excluded if name.rpartition("/")[0] in tars]
    if samples:
        raise ConfigError(
            f"{file} excludes {len(samples)} samples, such as {shown(min(samples), 60)}; whole tars can be excluded. "
            "Give the lengths: --lengths FILE."
        )
    missing = [name for name in tars if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{file} names {len(missing)} tars that {folder} lacks, such as {shown(missing[0], 60)}.")
    return [folder / name for name in tars]


def _read(file: Path) -> object:
    what = "split of an Energon data set"
    if file.suffix == ".json":
        return read_json(file, what)
    return parse_yaml(read_text(file, what), f"{what} {file}")


def _names(file: Path, listed: object) -> list[str]:
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise ConfigError(f"{file} needs lists of names under split_parts: train and exclude.")
    found = list(itertools.islice((name for one in listed for name in _expanded(file, one)), MOST_TARS + 1))
    if len(found) > MOST_TARS:
        raise ConfigError(f"{file} names more than {MOST_TARS} tars.")
    return found


def _expanded(file: Path, pattern: str) -> Iterator[str]:
    """Yield the names of a pattern like ``train/{0000..0127}.tar`` or ``{a,b}.tar``, in order."""
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    bounds = _RANGE.fullmatch(braces[1])
    upward = bounds is not None and int(bounds[1]) <= int(bounds[2])
    if _NESTED.search(pattern) or not (upward or (bounds is None and "," in braces[1])):
        raise ConfigError(f"{file}: {shown(pattern, 60)} is not a pattern of numbers {{0..9}} or names {{a,b}}.")
    if bounds is None:
        values = iter(braces[1].split(","))
    else:
        first, last = int(bounds[1]), int(bounds[2])
        width = max(map(len, bounds.groups())) if any(each[0] == "0" and each != "0" for each in bounds.groups()) else 0
        values = (f"{number:0{width}d}" for number in range(first, last + 1))
    for value in values:
        yield from _expanded(file, pattern[: braces.start()] + value + pattern[braces.end() :])
