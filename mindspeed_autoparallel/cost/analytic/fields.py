"""Reads single values of a request; errors name the key, the value and the rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from mindspeed_autoparallel.errors import ConfigError

_LARGEST = 10**12


def integer(section: Mapping[str, object], key: str, default: int | None, where: str, minimum: int = 1) -> int:
    """Return a whole number of at least ``minimum``; with ``default`` ``None`` the key is required."""
    value = section.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"{where}.{key} is missing.")
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"{where}.{key} is {value!r}, must be a whole number.")
    try:
        number = int(float(value))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where}.{key} is {value!r}, must be a whole number.") from error
    if number != float(value) or number < minimum:
        raise ConfigError(f"{where}.{key} is {value!r}, must be a whole number of at least {minimum}.")
    if number > _LARGEST:
        raise ConfigError(f"{where}.{key} is {value!r}, must be at most {_LARGEST}.")
    return number


def optional_integer(section: Mapping[str, object], key: str, where: str, minimum: int = 1) -> int | None:
    """Return a whole number, or ``None`` without the key."""
    return None if section.get(key) is None else integer(section, key, None, where, minimum)


def switch(section: Mapping[str, object], key: str, default: bool | None, where: str) -> bool | None:
    """Return a switch: true or false."""
    value = section.get(key)
    if value is None:
        return default
    if value not in (True, False) or not isinstance(value, (bool, int)):
        raise ConfigError(f"{where}.{key} is {value!r}, must be true or false.")
    return bool(value)


def number(section: Mapping[str, object], key: str, default: float, where: str, lowest: float, highest: float) -> float:
    """Return a number from ``lowest`` to ``highest``."""
    value = section.get(key, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not lowest <= value <= highest:
        limit = f"from {lowest:g} to {highest:g}" if highest < math.inf else f"of at least {lowest:g}"
        raise ConfigError(f"{where}.{key} is {value!r}, must be a number {limit}.")
    return float(value)


def is_section(value: object) -> TypeGuard[Mapping[str, object]]:
    """Return whether ``value`` is an object of keys and values."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


def section_of(request: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Return the object under ``key``."""
    value = request.get(key)
    if not is_section(value):
        raise ConfigError(f"{key} is missing or not an object.")
    return value


def part(section: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Return the object under ``key``; empty if missing."""
    value = section.get(key)
    return value if is_section(value) else {}


def optional_section(section: Mapping[str, object], key: str, where: str) -> Mapping[str, object] | None:
    """Return the object under ``key``, or ``None`` if missing or empty."""
    value = section.get(key)
    if not value:
        return None
    if not is_section(value):
        raise ConfigError(f"{where}.{key} is {value!r}, must be an object.")
    return value


def counts(section: Mapping[str, object], key: str, where: str) -> tuple[int, ...]:
    """Return a list of whole numbers of at least 0, or its text form ``5,6,6``; empty without the key."""
    value = section.get(key)
    if not value:
        return ()
    if isinstance(value, str):
        value = value.split(",")
    if not is_list(value):
        raise ConfigError(f"{where}.{key} is {value!r}, must be a list of whole numbers.")
    return tuple(integer({key: item}, key, None, where, 0) for item in value)


def words(section: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
    """Return a list of words, or its text form ``[a,b]``; empty without the key."""
    value = section.get(key)
    if not value or value is True:
        return ()
    if isinstance(value, str):
        value = [word for word in value.strip("[]").replace(",", " ").split() if word]
    if not is_list(value) or not all(isinstance(word, str) for word in value):
        raise ConfigError(f"{where}.{key} is {value!r}, must be a list of words.")
    return tuple(value)
