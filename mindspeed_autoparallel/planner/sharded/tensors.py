"""Sizes of parameter tensors that are cut by rows."""

from __future__ import annotations

import math
from collections import Counter


class Tensors(Counter[tuple[int, int]]):
    """Number of tensors by (rows, elements per row); tensors of unknown shape have rows of one element."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    @property
    def numel(self) -> int:
        """Return the number of elements of all tensors."""
        return sum(rows * size * count for (rows, size), count in self.items())

    def shard(self, ranks: int) -> int:
        """Return the number of elements of one shard: rows are cut and padded so that all ranks have equally many."""
        return sum(-(-rows // ranks) * size * count for (rows, size), count in self.items())

    def divided(self, ranks: int) -> Tensors:
        """Return the tensors of one of ``ranks`` ranks, each of which has whole rows of its own."""
        return Tensors({(-(-rows // ranks), size): count for (rows, size), count in self.items()})


def cut(elements: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
    """Return (rows, elements per row) of tensors; tensors of unknown ``shapes`` have rows of one element."""
    if not shapes:
        return [(number, 1) for number in elements]
    return [(shape[0], math.prod(shape[1:])) if shape else (1, 1) for shape in shapes]
