"""Reads single values of a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_autoparallel.cost.analytic.fields import integer, part


class HuggingFaceValues:
    """Reads sizes of a configuration; ``null`` is the same as a key that is not there."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values, self._where = values, where

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number; ``ConfigError`` where it is missing without a default, or none."""
        present = {key: self._values[key]} if self._values.get(key) is not None else {}
        return integer(present, key, default, self._where, least)

    def first(self, *keys: str) -> int:
        """Return the first of ``keys`` that is there, as a whole number."""
        return self.size(next((key for key in keys if self._values.get(key) is not None), keys[0]))

    def optional(self, key: str) -> int | None:
        """Return a whole number, ``None`` where the key is missing."""
        return self.size(key, 0, 0) or None

    def switch(self, key: str, default: bool = False) -> bool:
        """Return whether ``key`` is on."""
        value = self._values.get(key)
        return default if value is None else bool(value)

    def text(self, key: str) -> str:
        """Return a text; empty if missing."""
        value = self._values.get(key)
        return value if isinstance(value, str) else ""

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, as ``layer_types`` has how each layer attends; empty where there is none."""
        values = self._values.get(key)
        return [str(value) for value in values] if isinstance(values, list) else []

    def inner(self, key: str) -> HuggingFaceValues:
        """Return the section under ``key``; empty if missing."""
        return HuggingFaceValues(part(self._values, key), f"{self._where}: {key}")

    def numbers(self, key: str) -> list[int]:
        """Return a list with one number for each layer; empty where the file has none."""
        values = self._values.get(key)
        return [int(value) for value in values] if isinstance(values, list) else []
