"""A cut: one path through the schedule, whose length no plan's step goes below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray


class CriticalPath(Protocol):
    """How often a path passes every virtual stage."""

    @property
    def num_forwards(self) -> tuple[int, ...]:
        """Return forwards by virtual stage."""
        ...

    @property
    def num_backwards(self) -> tuple[int, ...]:
        """Return backwards by virtual stage."""
        ...


class Cut(NamedTuple):
    """Every plan takes at least its own stage times, so often, and the constant; in ticks."""

    forwards: tuple[int, ...]
    """By virtual stage."""
    backwards: tuple[int, ...]
    constant: int
    """Messages and host time."""
    tail_stage: int = -1
    """Stage whose work after the pipeline follows; -1: none."""

    @classmethod
    def of(
        cls,
        path: CriticalPath,
        forward: Sequence[float] | NDArray[Any],
        backward: Sequence[float] | NDArray[Any],
        end: float,
        tail_stage: int = -1,
    ) -> Cut:
        """Return the cut of a critical path that ends at ``end`` under these stage times, which may be fractions."""
        computed = sum(n * t for n, t in zip(path.num_forwards, forward, strict=True))
        computed += sum(n * t for n, t in zip(path.num_backwards, backward, strict=True))
        # What is left is messages and host time: whole ticks, whatever the rounding of the times.
        return cls(path.num_forwards, path.num_backwards, round(float(end - computed)), tail_stage)
