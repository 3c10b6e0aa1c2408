"""Steps between placements of a tensor on a mesh: the result of one collective, and the bytes that a device sends in
it.

A state is one placement per mesh dim. Outer mesh dims cut a tensor dim before inner ones. So a step on a mesh dim is
possible only if no inner mesh dim cuts a tensor dim whose cut the step removes or adds: otherwise pieces would not be
contiguous. Bytes are in units of the whole tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from mindspeed_autoparallel.operators.graph.node import PARTIAL, REPLICATE

State = tuple[int, ...]
Move = tuple[tuple[int, ...], int, int]
"""Mesh dims, and their placement before and after."""


def is_valid(state: Sequence[int], mesh: Sequence[int], caps: Sequence[int]) -> bool:
    """Return whether every tensor dim divides: ``caps[d]`` is the largest number of parts of dim ``d``."""
    return all(
        cap % math.prod(n for n, p in zip(mesh, state, strict=True) if p == d) == 0 for d, cap in enumerate(caps)
    )


def transitions(state: State, mesh: tuple[int, ...], caps: tuple[int, ...]) -> Iterator[tuple[Move, State, float]]:
    """Yield every step from ``state``, a valid one: the move, the state after it, and the share one device sends."""
    parts = [1] * len(caps)
    for n, p in zip(mesh, state, strict=True):
        if p >= 0:
            parts[p] *= n
    local = 1.0 / math.prod(parts)
    last = {p: d for d, p in enumerate(state)}
    for before in dict.fromkeys(state):
        dims = [d for d, p in enumerate(state) if p == before]
        # A slice over several dims is a sequence of slices.
        for size in range(1, 2 if before == REPLICATE else len(dims) + 1):
            # Only the innermost cuts of a tensor dim can be removed.
            choices = itertools.combinations(dims, size) if before < 0 else (tuple(dims[-size:]),)
            for chosen in choices:
                number = math.prod(mesh[d] for d in chosen)
                for after in (REPLICATE, *range(len(caps))):
                    if after == before or (after == REPLICATE and before >= 0 and size > 1):
                        continue
                    # No inner mesh dim may cut the tensor dim of the new cut, and that dim has to divide.
                    if after >= 0 and (last.get(after, -1) > chosen[0] or caps[after] % (parts[after] * number)):
                        continue
                    moved_to = list(state)
                    for d in chosen:
                        moved_to[d] = after
                    yield (chosen, before, after), tuple(moved_to), bytes_sent(before, after, number, local)


def bytes_sent(before: int, after: int, parts: int, local: float) -> float:
    """Return the bytes one device sends in a ring of ``parts``, for pieces of ``local`` bytes before the step."""
    if before == REPLICATE:
        return 0.0
    if before == PARTIAL:
        return (2 if after == REPLICATE else 1) * (parts - 1) * local / parts
    return (parts - 1) * local * (1.0 if after == REPLICATE else 1.0 / parts)
