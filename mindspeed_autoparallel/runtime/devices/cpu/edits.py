"""Attribute replacements that remember what they replaced."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import FunctionType
from typing import Any

_MISSING = object()


class Edits:
    """Replacements that can be undone, in reverse order. Undone edits stay undone: make new ones."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.undone = False
        """Asked by edits that wait for a module to be imported."""
        self.left_in_place: list[str] = []
        """After ``undo``: names somebody else has replaced since, which were left as they are."""

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Set ``holder.name = value`` and remember what was there."""
        before = _own(holder, name)
        setattr(holder, name, value)
        self._undo.append(lambda: self._restore(holder, name, value, before))

    def set_variable_default(self, name: str, value: str) -> None:
        """Set an environment variable, unless it is set already."""
        if name not in os.environ:
            os.environ[name] = value
            self._undo.append(functools.partial(_unset_variable, name))

    def on_undo(self, restore: Callable[[], None]) -> None:
        """Remember anything else to be put back."""
        self._undo.append(restore)

    def undo(self) -> None:
        """Restore every attribute as it was, or absent as it was."""
        self.undone = True
        while self._undo:
            self._undo.pop()()

    def _restore(self, holder: Any, name: str, value: Any, before: Any) -> None:
        if _own(holder, name) is not value:
            # Another plugin has wrapped ours; taking ours away would take theirs with it.
            self.left_in_place.append(f"{getattr(holder, '__name__', holder)}.{name}")
        elif before is _MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


def _unset_variable(name: str) -> None:
    os.environ.pop(name, None)


def _own(holder: Any, name: str) -> Any:
    """Return the attribute as it is stored on ``holder`` itself: no descriptor is bound, nothing is inherited."""
    if isinstance(holder, FunctionType) and name not in vars(holder):
        return getattr(holder, name, _MISSING)  # __defaults__ and the like
    return vars(holder).get(name, _MISSING)
