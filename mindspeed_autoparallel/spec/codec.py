"""Dataclasses to JSON values and back, with errors that name the key, the value and the expected type.

Supports dataclasses, ``str``, ``int``, ``float``, ``bool``, ``tuple[T, ...]``, ``dict[str, T]`` (also as
``Mapping``) and ``T | None``. Unknown keys, missing keys and non-finite
numbers are errors: a partly read file would give a wrong plan.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from mindspeed_autoparallel.errors import AutoParallelError, ConfigError
from mindspeed_autoparallel.files import json_text, read_json, shown, write_text_atomic

T = TypeVar("T")
Decoder = Callable[[Any, str, type[AutoParallelError]], Any]
"""Converts a JSON value; the text is its path in messages."""
_LARGEST = 2**53
"""Largest whole number: beyond it other JSON readers lose digits, and no size of a training is as large."""


def to_json(value: Any) -> Any:
    """Convert ``value`` to JSON values; dataclass fields keep their order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[T], value: Any, where: str, error: type[AutoParallelError] = ConfigError) -> T:
    """Convert ``value`` (parsed JSON) to a ``kind``; ``where`` starts the path in messages; bad input raises
    ``error``."""
    result: T = _decoder(cast("Any", kind))(value, where, error)
    return result


@functools.cache
def _decoder(kind: Any) -> Decoder:
    """Return the function that decodes a ``kind``: what depends on the type alone is worked out once."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return functools.partial(_decode_dataclass, kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return functools.partial(_decode_optional, _decoder(next(one for one in arguments if one is not type(None))))
    if origin is tuple:
        return functools.partial(_decode_tuple, _decoder(arguments[0]))
    if origin in (dict, Mapping):
        return functools.partial(_decode_dict, _decoder(arguments[1]))
    return functools.partial(_decode_scalar, kind)


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Decoder, bool]]:
    """Return per field of a dataclass its decoder, and whether a file must have it."""
    hints, missing = get_type_hints(kind), dataclasses.MISSING
    return {
        field.name: (_decoder(hints[field.name]), field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
    }


def _decode_optional(decode: Decoder, value: Any, where: str, error: type[AutoParallelError]) -> Any:
    return None if value is None else decode(value, where, error)


def _decode_tuple(decode: Decoder, value: Any, where: str, error: type[AutoParallelError]) -> Any:
    if not isinstance(value, list):
        raise error(f"{where}: expected a list, got {_short(value)}.")
    return tuple([decode(item, f"{where}[{index}]", error) for index, item in enumerate(value)])


def _decode_dict(decode: Decoder, value: Any, where: str, error: type[AutoParallelError]) -> Any:
    if not isinstance(value, dict):
        raise error(f"{where}: expected an object, got {_short(value)}.")
    return {str(key): decode(item, f"{where}.{key}", error) for key, item in value.items()}


def _decode_scalar(kind: Any, value: Any, where: str, error: type[AutoParallelError]) -> Any:
    if kind is Any or kind is object:
        return value
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise error(f"{where}: expected a finite number, got {value}.")
        return float(value)
    if kind is int and isinstance(value, (int, float)) and not isinstance(value, bool):
        if abs(value) > _LARGEST:
            raise error(f"{where}: expected a whole number of at most {_LARGEST}, got {_short(value)}.")
        if isinstance(value, int) or value.is_integer():
            return int(value)
    if kind in (str, bool) and isinstance(value, kind):
        return value
    raise error(f"{where}: expected {kind.__name__}, got {_short(value)}.")


def _decode_dataclass(kind: Any, value: Any, where: str, error: type[AutoParallelError]) -> Any:
    if not isinstance(value, dict):
        raise error(f"{where}: expected an object ({kind.__name__}), got {_short(value)}.")
    fields = _fields(kind)
    unknown = sorted(value.keys() - fields.keys())
    if unknown:
        raise error(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(fields)}.")
    arguments = {}
    for name, (decode, is_required) in fields.items():
        if name in value:
            arguments[name] = decode(value[name], f"{where}.{name}", error)
        elif is_required:
            raise error(f"{where}: key {name!r} is missing.")
    try:
        return kind(**arguments)
    except AutoParallelError as problem:
        raise error(f"{where}: {problem}") from problem


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


Record = TypeVar("Record", bound="JsonFile")


class JsonFile:
    """Base of dataclasses that are written to a file of their own; ``format`` and ``schema_version`` have defaults."""

    format: str
    schema_version: int
    WHAT: ClassVar[str]
    """Name of the file in messages."""
    AGAIN: ClassVar[str]
    """How to make a file of this version."""
    ERROR: ClassVar[type[AutoParallelError]]

    def text(self) -> str:
        """Return the JSON as ``write`` writes it."""
        return json_text(to_json(self))

    def sha256(self) -> str:
        """Return a hash of the content, independent of the file's formatting."""
        return hashlib.sha256(json.dumps(to_json(self), sort_keys=True).encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Write the record as JSON, atomically."""
        write_text_atomic(path, self.text())

    @classmethod
    def read(cls: type[Record], path: Path) -> Record:
        """Read and check a file; raises ``ERROR`` for a foreign one, another version, or broken contents."""
        return cls.parse(read_json(path, cls.WHAT.removesuffix(" of this tool")), str(path))

    @classmethod
    def parse(cls: type[Record], value: Any, where: str = "") -> Record:
        """Return the record from parsed JSON; ``where`` names it in messages."""
        where = where or cls.WHAT
        found = value.get("format") if isinstance(value, dict) else None
        if found != cls.format:
            own = "" if found is None else f"is {shown(repr(found))}, "
            raise cls.ERROR(f"{where} is not a {cls.WHAT} (key 'format' {own}should be {cls.format!r}). {cls.AGAIN}")
        if value.get("schema_version") != cls.schema_version:
            raise cls.ERROR(
                f"{where} has schema_version {shown(value.get('schema_version'))}; this release reads "
                f"{cls.schema_version}. {cls.AGAIN}"
            )
        return from_json(cls, value, where, cls.ERROR)
