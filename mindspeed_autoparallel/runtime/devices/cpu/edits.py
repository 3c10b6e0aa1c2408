"""Attribute replacements that can be undone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``holder.name = value`` within the context."""
    before = _own(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        _restore(holder, name, before)


class Edits:
    """Replacements that ``undo`` reverts in reverse order. For edits after ``undo``, make a new object."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self.undone = False
        """Checked by edits that wait for a module to be imported."""
        self.left_in_place: list[str] = []
        """After ``undo``: names that other code has replaced since, which were left as they are."""

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Set ``holder.name = value`` and keep the old value for ``undo``."""
        before = _own(holder, name)
        setattr(holder, name, value)
        self._undo.append(lambda: self._restore(holder, name, value, before))

    def set_variable_default(self, name: str, value: str) -> None:
        """Set an environment variable, unless it is set already."""
        if name not in os.environ:
            os.environ[name] = value
            self._undo.append(lambda: os.environ.pop(name, None))

    def on_undo(self, restore: Callable[[], None]) -> None:
        """Register any other function that restores something."""
        self._undo.append(restore)

    def undo(self) -> None:
        """Restore every attribute, and delete those that did not exist."""
        self.undone = True
        while self._undo:
            self._undo.pop()()

    def _restore(self, holder: Any, name: str, value: Any, before: Any) -> None:
        if _own(holder, name) is not value:
            # Another plugin has wrapped ours; removing ours would remove theirs as well.
            self.left_in_place.append(f"{getattr(holder, '__name__', holder)}.{name}")
        else:
            _restore(holder, name, before)


def _restore(holder: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        delattr(holder, name)
    else:
        setattr(holder, name, before)


def _own(holder: Any, name: str) -> Any:
    """Return the attribute as it is stored on ``holder`` itself: no descriptor is bound, nothing is inherited."""
    if isinstance(holder, FunctionType) and name not in vars(holder):
        return getattr(holder, name, _MISSING)  # __defaults__ and the like
    return vars(holder).get(name, _MISSING)
