"""One object of a json file, read key by key: checks ranges and records which keys were never read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_autoparallel.errors import ConfigError

_Scalar = TypeVar("_Scalar", int, float)
_REQUIRED: Any = object()


class Section:
    """``values`` is the object at ``path`` (dotted, empty for the whole file) of ``file``."""

    def __init__(self, values: Any, file: Path, path: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{file}: {path or 'the file'} must be an object of key: value pairs, not {values!r}.")
        self._values = values
        self._file = file
        self._path = path
        self._asked: set[str] = set()
        self._children: list[Section] = []

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def where(self, key: str) -> str:
        """Return the file and the dotted key, for messages."""
        return f"{self._file}: {self._path + '.' if self._path else ''}{key}"

    def raw(self, key: str, default: Any = None) -> Any:
        """Return the value as it is in the file; null counts as missing."""
        self._asked.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def child(self, key: str) -> Section:
        """Return the object under ``key``; an empty one if the key is missing."""
        section = Section(self.raw(key, {}), self._file, f"{self._path}.{key}" if self._path else key)
        self._children.append(section)
        return section

    def integer(self, key: str, default: Any = _REQUIRED, *, at_least: int = 1, at_most: int | None = None) -> int:
        """Return a whole number in the range; ``ConfigError`` otherwise."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, _range_text("a whole number", at_least, at_most))
        return self._in_range(key, value, "a whole number", at_least, at_most)

    def number(
        self, key: str, default: Any = _REQUIRED, *, at_least: float = 0.0, at_most: float | None = None
    ) -> float:
        """Return a number in the range; ``ConfigError`` otherwise."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, value, _range_text("a number", at_least, at_most))
        return self._in_range(key, float(value), "a number", at_least, at_most)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def choice(self, key: str, choices: Sequence[str], default: Any = _REQUIRED) -> str:
        """Return one of ``choices``."""
        value = self._value(key, default)
        if value not in choices:
            raise self.error(key, value, "one of " + ", ".join(choices))
        return str(value)

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        return value

    def integers(self, key: str, default: Sequence[int] = (), *, at_least: int = 0) -> tuple[int, ...]:
        """Return a list of whole numbers, each at least ``at_least``."""
        value = self.raw(key, default)
        value = list(value) if isinstance(value, tuple) else value
        if not isinstance(value, list) or any(
            isinstance(item, bool) or not isinstance(item, int) or item < at_least for item in value
        ):
            raise self.error(key, value, f"a list of whole numbers, each at least {at_least}")
        return tuple(value)

    def accept(self, keys: Iterable[str]) -> None:
        """Accept keys that other hosts read and that have no effect here."""
        self._asked.update(keys)

    def error(self, key: str, value: Any, allowed: str) -> ConfigError:
        """Return the error for a wrong ``value`` under ``key``."""
        if value is _REQUIRED:
            return ConfigError(f"{self.where(key)} is missing; give {allowed}.")
        return ConfigError(f"{self.where(key)} is {value!r}; it must be {allowed}.")

    def unknown_keys(self) -> list[str]:
        """Return dotted keys that were neither read nor accepted, including those of the children."""
        prefix = f"{self._path}." if self._path else ""
        mine = [prefix + key for key, value in self._values.items() if key not in self._asked and value is not None]
        return mine + [key for child in self._children for key in child.unknown_keys()]

    def report_unknown_keys(self) -> list[str]:
        """Print one line about the unknown keys, if there are any; returns them."""
        unknown = self.unknown_keys()
        if unknown:
            print(f"{self._file}: keys without effect here: {', '.join(unknown)}", file=sys.stderr)
        return unknown

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw(key, default)
        if value is _REQUIRED:
            raise ConfigError(f"{self.where(key)} is missing.")
        return value

    def _in_range(self, key: str, value: _Scalar, kind: str, at_least: _Scalar, at_most: _Scalar | None) -> _Scalar:
        if value < at_least or (at_most is not None and value > at_most):
            raise self.error(key, value, _range_text(kind, at_least, at_most))
        return value


def _range_text(kind: str, at_least: float, at_most: float | None) -> str:
    return f"{kind} of at least {at_least}" if at_most is None else f"{kind} between {at_least} and {at_most}"
