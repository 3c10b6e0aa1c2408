"""How far a conversion is: told tensor by tensor to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable

# (tensors done, tensors in all, what is being written)
Progress = Callable[[int, int, str], None]


def silent(done: int, total: int, what: str) -> None:
    """Show nothing."""
