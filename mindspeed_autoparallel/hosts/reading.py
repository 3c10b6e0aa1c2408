"""Read typed values out of a configuration tree, with errors that name the file and the dotted key."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_LONG, _CLOSE = 8, 0.86
"""Letters of names that are compared, and how close two are: "ulises_size" and "ulysses_size" 0.87."""


@dataclass(frozen=True)
class Values:
    """A tree of sections, and its file's name."""

    tree: Mapping[str, object]
    name: str

    def has(self, key: str) -> bool:
        """Return whether ``key`` has a value other than null."""
        return self.at(key) is not None

    def at(self, key: str) -> Any:
        """Return the value at the dotted ``key``, ``None`` if it is missing."""
        value: Any = self.tree
        walked: list[str] = []
        for part in key.split("."):
            if value is None:
                return None
            if not isinstance(value, Mapping):
                raise ConfigError(f"{self.name}: {'.'.join(walked)} must be a section with keys, got {shown(value)}.")
            value = value.get(part)
            walked.append(part)
        return value

    def refuse_misspelt(self, trainer: str, keys: Collection[str]) -> None:
        """Raise ``ConfigError`` for a key that differs by a letter or two from a missing one of ``keys``."""
        for key in keys:
            section, _, name = key.rpartition(".")
            siblings = self.at(section) if section else self.tree
            if len(name) < _LONG or not isinstance(siblings, Mapping) or name in siblings:
                continue
            known = {one.rpartition(".")[2] for one in keys}
            unknown = [str(one) for one in siblings if one not in known and name not in str(one)]
            for found in difflib.get_close_matches(name, unknown, 1, _CLOSE):
                raise ConfigError(
                    f"{self.name}: {section or 'it'} has {found}, which {trainer} does not have; use {name}."
                )

    def integer(self, key: str, default: int, least: int = 0) -> int:
        """Return a whole number of at least ``least``; digits in quotes count."""
        value = self.at(key)
        if value is None:
            return default
        if isinstance(value, str) and value.strip().isdigit():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{self.name}: {key} must be a whole number of at least {least}, got {shown(value)}.")
        return value

    def switch(self, key: str, default: bool) -> bool:
        """Return a boolean, also from ``"true"`` and 1."""
        value = self.at(key)
        if value is None:
            return default
        written = str(value).lower()
        if written not in (*_TRUE, *_FALSE):
            raise ConfigError(f"{self.name}: {key} must be true or false, got {shown(value)}.")
        return written in _TRUE

    def text(self, key: str, default: str = "") -> str:
        """Return text; numbers keep their spelling."""
        value = self.at(key)
        if value is None:
            return default
        if isinstance(value, list | Mapping):
            raise ConfigError(f"{self.name}: {key} must be text, got {shown(value)}.")
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts; a missing one is empty."""
        value = self.at(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{self.name}: {key} must be a list of texts, got {shown(value)}.")
        return tuple(value)
