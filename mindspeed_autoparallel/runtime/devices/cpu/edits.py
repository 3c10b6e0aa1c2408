"""Attribute replacements that remember what they replaced."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Edits:
    """A list of ``setattr`` calls that can be undone, in reverse order."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, holder: Any, name: str, value: Any) -> None:
        """``holder.name = value``, remembered."""
        own = vars(holder) if hasattr(holder, "__dict__") else {}
        self._undo.append((holder, name, own.get(name, _MISSING)))
        setattr(holder, name, value)

    def undo(self) -> None:
        """Restore every attribute as it was, or absent as it was."""
        while self._undo:
            holder, name, value = self._undo.pop()
            if value is _MISSING:
                delattr(holder, name)
            else:
                setattr(holder, name, value)
