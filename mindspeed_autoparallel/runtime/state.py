"""State of a process between calls of the host: the only module-level state in ``runtime``.

The host calls its patched functions without any argument of this package; they find the current work here (a
measurement, a check of a plan, a training under several layouts).
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")

_INSTANCES: dict[type[Any], Any] = {}


def of_process(kind: type[T]) -> T:
    """Return this process's only instance of ``kind``, created without arguments on the first call."""
    if kind not in _INSTANCES:
        _INSTANCES[kind] = kind()
    found: T = _INSTANCES[kind]
    return found
