"""Placements by count: how many equal mesh dims cut each tensor dim, regardless of which.

The bytes between two counts are never more than those between any two placements with these counts. So a search over
counts gives a lower bound on the search over placements, with far fewer states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy

from mindspeed_autoparallel.operators.graph.node import PARTIAL, REPLICATE
from mindspeed_autoparallel.operators.graph.shortest import least_costs
from mindspeed_autoparallel.operators.graph.transitions import State, bytes_sent, is_valid

MOST_STATES = 1000
"""Most counts of one tensor that are tabulated."""


@lru_cache(maxsize=1 << 18)
def counted(state: State, mesh: tuple[int, ...]) -> State:
    """Sort ``state`` within mesh dims of equal size: placements (or cuts) with equal counts become equal."""
    return _placed(mesh, [sorted(state[d] for d in dims) for dims in alike_dims(mesh)])


@lru_cache(maxsize=256)
def alike_dims(mesh: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Group the mesh dims by size."""
    return tuple(tuple(d for d, n in enumerate(mesh) if n == size) for size in dict.fromkeys(mesh))


def _placed(mesh: tuple[int, ...], values: Sequence[Sequence[int]]) -> State:
    """Return ``values``, given by group of ``alike_dims``, in the order of the mesh dims."""
    result = [0] * len(mesh)
    for dims, row in zip(alike_dims(mesh), values, strict=True):
        for dim, value in zip(dims, row, strict=True):
            result[dim] = value
    return tuple(result)


def all_counts(values: Sequence[int], mesh: tuple[int, ...]) -> Iterator[State]:
    """Yield every count of ``values`` over ``mesh``, sorted among dims of equal size."""
    groups = alike_dims(mesh)
    ordered = sorted(values)
    for chosen in itertools.product(*(itertools.combinations_with_replacement(ordered, len(dims)) for dims in groups)):
        yield _placed(mesh, chosen)


@lru_cache(maxsize=1 << 14)
def orders(count: State, mesh: tuple[int, ...]) -> tuple[State, ...]:
    """List every arrangement of ``count`` over the mesh dims."""
    ways = [sorted(set(itertools.permutations([count[d] for d in dims]))) for dims in alike_dims(mesh)]
    return tuple(_placed(mesh, chosen) for chosen in itertools.product(*ways))


def least_shares(shape: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[dict[State, int], numpy.ndarray] | None:
    """Index the counts of a tensor of ``shape``; tabulate the least share of it that a device sends between any two.

    None for more than ``MOST_STATES`` counts.
    """
    devices = math.prod(mesh)
    caps = tuple(math.gcd(n, devices) for n in shape)
    used = tuple(d for d, cap in enumerate(caps) if cap > 1)
    alphabet = len(used) + 2
    if math.prod(math.comb(len(dims) + alphabet - 1, len(dims)) for dims in alike_dims(mesh)) > MOST_STATES:
        return None
    index, shares = _table(mesh, tuple(caps[d] for d in used))
    number = {PARTIAL: PARTIAL, REPLICATE: REPLICATE, **dict(enumerate(used))}
    return {counted(tuple(number[p] for p in state), mesh): at for state, at in index.items()}, shares


@lru_cache(maxsize=512)
def _table(mesh: tuple[int, ...], caps: tuple[int, ...]) -> tuple[dict[State, int], numpy.ndarray]:
    alphabet = (PARTIAL, REPLICATE, *range(len(caps)))
    states = [state for state in all_counts(alphabet, mesh) if is_valid(state, mesh, caps)]
    index = {state: number for number, state in enumerate(states)}
    nexts = []
    for state in states:
        steps = list(_transitions(state, mesh, caps))
        after = numpy.array([index[state] for state, _ in steps], dtype=int)
        nexts.append((after, numpy.array([moved for _, moved in steps])[:, None]))
    return index, least_costs(nexts)


def _transitions(state: State, mesh: tuple[int, ...], caps: tuple[int, ...]) -> Iterator[tuple[State, float]]:
    """Yield every step from ``state``, for any order of the mesh dims: the next state, and the share sent."""
    local = 1.0 / math.prod(n for n, p in zip(mesh, state, strict=True) if p >= 0)
    for before in dict.fromkeys(state):
        # Equal mesh dims with one placement are interchangeable: try only the first ones.
        held = [[d for d in dims if state[d] == before] for dims in alike_dims(mesh)]
        for numbers in itertools.product(*(range(len(dims) + 1) for dims in held)):
            chosen = [d for dims, number in zip(held, numbers, strict=True) for d in dims[:number]]
            if not chosen or (before == REPLICATE and len(chosen) > 1):
                continue
            parts = math.prod(mesh[d] for d in chosen)
            for after in (REPLICATE, *range(len(caps))):
                moved_to = counted(tuple(after if d in chosen else p for d, p in enumerate(state)), mesh)
                if after != before and is_valid(moved_to, mesh, caps):
                    yield moved_to, bytes_sent(before, after, parts, local)
