"""Dataclasses to JSON values and back, with errors that name the key, the value and the expected type.

Supports dataclasses, ``str``, ``int``, ``float``, ``bool``, ``tuple[T, ...]``, ``dict[str, T]`` and ``T | None``.
Unknown keys (other than a class's ``RETIRED_KEYS``, which earlier files have), missing keys and non-finite numbers are
errors: a partly read file would give a wrong plan.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from mindspeed_autoparallel.errors import AutoParallelError, ConfigError

T = TypeVar("T")
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
    result: T = _decode(kind, value, where, error)
    return result


@functools.cache
def _hints(kind: type) -> dict[str, object]:
    return get_type_hints(kind)


def _decode(kind: Any, value: Any, where: str, error: type[AutoParallelError]) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, where, error)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _decode(next(option for option in get_args(kind) if option is not type(None)), value, where, error)
    if origin is tuple:
        if not isinstance(value, list):
            raise error(f"{where}: expected a list, got {_short(value)}.")
        return tuple(_decode(get_args(kind)[0], item, f"{where}[{index}]", error) for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise error(f"{where}: expected an object, got {_short(value)}.")
        return {str(key): _decode(get_args(kind)[1], item, f"{where}.{key}", error) for key, item in value.items()}
    return _decode_scalar(kind, value, where, error)


def _decode_scalar(kind: Any, value: Any, where: str, error: type[AutoParallelError]) -> Any:
    if kind in (Any, object):
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
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(fields) - getattr(kind, "RETIRED_KEYS", frozenset()))
    if unknown:
        raise error(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(fields)}.")
    hints = _hints(kind)
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _decode(hints[name], value[name], f"{where}.{name}", error)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error(f"{where}: key {name!r} is missing.")
    try:
        return kind(**arguments)
    except AutoParallelError as problem:
        raise error(f"{where}: {problem}") from problem


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
