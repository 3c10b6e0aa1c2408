"""Holds what a process is doing between calls of the host: the one place in ``runtime`` with state of a module.

The host's patched functions are called without anything of ours among their arguments; what they continue (a
measurement, a check of a plan, a training under several layouts) they find here.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")

_INSTANCES: dict[type[Any], Any] = {}


def of_process(kind: type[T]) -> T:
    """Return this process's one instance of ``kind``, made without arguments where there is none yet."""
    if kind not in _INSTANCES:
        _INSTANCES[kind] = kind()
    found: T = _INSTANCES[kind]
    return found
