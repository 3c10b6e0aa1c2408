"""Read typed values out of a configuration tree, with errors that name the file and the dotted key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


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
