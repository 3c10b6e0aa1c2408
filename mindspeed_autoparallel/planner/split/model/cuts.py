"""A cut: one path through the schedule, whose length is a lower bound of every plan's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray


class CriticalPath(Protocol):
    """The number of times that a path passes every virtual stage."""

    @property
    def num_forwards(self) -> tuple[int, ...]:
        """Return forwards by virtual stage."""
        ...

    @property
    def num_backwards(self) -> tuple[int, ...]:
        """Return backwards by virtual stage."""
        ...


class Cut(NamedTuple):
    """A lower bound of every plan's step: its stage times, each times the path's passes, plus a constant in ticks."""

    forwards: tuple[int, ...]
    """Forwards on the path by virtual stage; ``backwards`` likewise."""
    backwards: tuple[int, ...]
    constant: int
    """Ticks of messages and host time on the path."""
    tail_stage: int = -1
    """Stage whose tail after the pipeline ends the path; -1: none."""

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
        # The rest of the path is messages and host time, which are whole ticks even if the stage times are not.
        return cls(path.num_forwards, path.num_backwards, round(float(end - computed)), tail_stage)
