"""The sequence of collectives that moves the fewest bytes between two placements of a tensor.

Bytes are in units of the whole tensor, so one table serves every tensor with the same divisors.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy

from mindspeed_autoparallel.operators.graph.node import PARTIAL, REPLICATE
from mindspeed_autoparallel.operators.graph.remaining import Remaining
from mindspeed_autoparallel.operators.graph.transitions import Move, State, is_valid, transitions

_STEP = 1e-9
"""Cost added per step, in units of the tensor, so that the shorter of equally cheap sequences is used."""
_LESS = 1e-12
"""Differences below this are rounding."""
_LARGEST_TABLE = 260
"""Most states for which all pairs are solved at once."""
_LARGEST_MATRIX = 630
_LARGEST_WITH_SPARE = 50_000
"""Most states for which tensor dims that neither end cuts may be used."""
_LARGEST_SEARCH, _LARGEST_TRIED, _MOST_TAKEN = 300_000, 2_000_000, 100_000
"""Most states of an unlimited search; most states of a limited one, and the most that it visits."""
_MOST_DIMS = 4
"""Most tensor dims that a sequence may use: those of its ends, then the most divisible others."""


@lru_cache(maxsize=1 << 18)
def shortest_moves(source: State, target: State, shape: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[Move, ...]:
    """Return the moves of least bytes from ``source`` to ``target`` of a tensor of ``shape`` elements on ``mesh``.

    Moves are slices, all-gathers, all-to-alls, reduce-scatters and all-reduces over one or more mesh dims. If a table
    holds all placements of the tensor (up to three mesh dims; four if at most three tensor dims can be cut), the result
    is the least of all sequences. Otherwise neighbouring mesh dims with equal ends move as one, and tensor dims that
    neither end cuts are used only up to 50,000 placements. Above 300,000 placements a search gives up after 100,000 of
    them, and above 2,000,000 at once; a second search then leaves each mesh dim whole or as at one of the ends.
    Raises ``AssertionError`` for a target with a pending sum.
    """
    if source == target:
        return ()
    assert PARTIAL not in target, "operators read whole or cut tensors, never a pending sum"
    whole = _whole_table(shape, mesh)
    if whole is not None and source in whole.index and target in whole.index:
        path = _path(whole.follow, whole.moves, whole.index[source], whole.index[target])
        return tuple((dims, whole.real(a), whole.real(b)) for dims, a, b in path)
    joined = _joined(source, target)
    sizes = tuple(math.prod(mesh[d] for d in dims) for dims in joined)
    first = [dims[0] for dims in joined]
    start, end = tuple(source[d] for d in first), tuple(target[d] for d in first)
    used = sorted({p for p in (*start, *end) if p >= 0})
    devices = math.prod(mesh)
    others = sorted((d for d in range(len(shape)) if d not in used), key=lambda d: -math.gcd(shape[d], devices))
    for spare in others:
        if math.gcd(shape[spare], devices) == 1 or (len(used) + 3) ** len(sizes) > _LARGEST_WITH_SPARE:
            break
        if len(used) < _MOST_DIMS:
            used.append(spare)
    used.sort()
    number = {d: index for index, d in enumerate(used)}
    caps = tuple(math.gcd(shape[d], devices) for d in used)
    short = [tuple(number.get(p, p) for p in ends) for ends in (start, end)]
    moves = _solve(short[0], short[1], sizes, caps)

    def real(placement: int) -> int:
        return used[placement] if placement >= 0 else placement

    return tuple((tuple(d for at in dims for d in joined[at]), real(a), real(b)) for dims, a, b in moves)


def _joined(source: State, target: State) -> list[tuple[int, ...]]:
    """Group neighbouring mesh dims with equal start and end: they act as one dim of their product."""
    groups: list[tuple[int, ...]] = []
    for d in range(len(source)):
        if d and source[d] == source[d - 1] and target[d] == target[d - 1]:
            groups[-1] = (*groups[-1], d)
        else:
            groups.append((d,))
    return groups


def _solve(source: State, target: State, mesh: tuple[int, ...], caps: tuple[int, ...]) -> list[Move]:
    if (len(caps) + 2) ** len(mesh) <= _LARGEST_TABLE:
        index, _, follow, moves = _table(mesh, caps)
        return _path(follow, moves, index[source], index[target])
    return _search(source, target, mesh, caps)


def _path(follow: numpy.ndarray, moves: dict[tuple[int, int], Move], at: int, end: int) -> list[Move]:
    path: list[Move] = []
    while at != end:
        after = int(follow[at, end])
        path.append(moves[at, after])
        at = after
    return path


@dataclass(frozen=True)
class _Whole:
    """A table over all placements of a tensor, whose states are named by its own dims."""

    index: dict[State, int]
    bytes_: numpy.ndarray
    follow: numpy.ndarray
    moves: dict[tuple[int, int], Move]
    dims: tuple[int, ...]

    def real(self, placement: int) -> int:
        return self.dims[placement] if placement >= 0 else placement


@lru_cache(maxsize=4096)
def _whole_table(shape: tuple[int, ...], mesh: tuple[int, ...]) -> _Whole | None:
    """Return the table over all placements of a tensor of ``shape``; None if there are too many."""
    caps = [math.gcd(n, math.prod(mesh)) for n in shape]
    dims = tuple(d for d, cap in enumerate(caps) if cap > 1)
    if (len(dims) + 2) ** len(mesh) > _LARGEST_MATRIX or len(mesh) > 4:
        return None
    index, bytes_, follow, moves = _table(mesh, tuple(caps[d] for d in dims))
    named = {tuple(dims[p] if p >= 0 else p for p in state): at for state, at in index.items()}
    return _Whole(named, bytes_, follow, moves, dims)


@lru_cache(maxsize=4096)
def _table(
    mesh: tuple[int, ...], caps: tuple[int, ...]
) -> tuple[dict[State, int], numpy.ndarray, numpy.ndarray, dict[tuple[int, int], Move]]:
    """Return the index of every valid state, the share sent between any two, the next state on their path, and the
    moves of single steps."""
    alphabet = (PARTIAL, REPLICATE, *range(len(caps)))
    states = [s for s in itertools.product(alphabet, repeat=len(mesh)) if is_valid(s, mesh, caps)]
    index = {state: number for number, state in enumerate(states)}
    moves: dict[tuple[int, int], Move] = {}
    nexts: list[tuple[numpy.ndarray, numpy.ndarray]] = []
    for a, state in enumerate(states):
        costs: dict[int, float] = {}
        for move, after, moved in transitions(state, mesh, caps):
            b = index[after]
            if moved + _STEP < costs.get(b, math.inf):
                costs[b], moves[a, b] = moved + _STEP, move
        nexts.append((numpy.array([*costs], dtype=int), numpy.array([*costs.values()])[:, None]))
    bytes_ = least_costs(nexts)
    follow = _next_on_the_way(nexts, bytes_)
    return index, bytes_, follow, moves


Nexts = Sequence[tuple[numpy.ndarray, numpy.ndarray]]
"""Per state, the states that one step reaches ``[steps]``, and the costs of the steps ``[steps, 1]``."""


def least_costs(nexts: Nexts) -> numpy.ndarray:
    """Return the least cost between any two states, infinite without a path."""
    number = len(nexts)
    least: numpy.ndarray = numpy.full((number, number), numpy.inf)
    numpy.fill_diagonal(least, 0.0)
    settled = False
    while not settled:
        settled = True
        for a, (after, cost) in enumerate(nexts):
            if after.size:
                found = numpy.minimum((cost + least[after]).min(axis=0), least[a])
                settled = settled and not (found < least[a] - _LESS).any()
                least[a] = found
    return least


def _next_on_the_way(nexts: Nexts, least: numpy.ndarray) -> numpy.ndarray:
    """Return the state after the first one on the path between any two; every step costs more than 0."""
    follow: numpy.ndarray = numpy.tile(numpy.arange(len(nexts)), (len(nexts), 1))
    for a, (after, cost) in enumerate(nexts):
        if after.size:
            follow[a] = after[(cost + least[after]).argmin(axis=0)]
            follow[a, a] = a
    return follow


def all_pairs(shape: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[dict[State, int], numpy.ndarray] | None:
    """Index the placements of a tensor of ``shape``, and tabulate the share of it that a device sends between any two.

    None for too many placements.
    """
    whole = _whole_table(shape, mesh)
    if whole is None:
        return None
    smallest = math.prod(mesh) ** 2  # shares are multiples of 1 / smallest: rounding removes _STEP
    return whole.index, numpy.round(whole.bytes_ * smallest) / smallest


@lru_cache(maxsize=1 << 16)
def _search(source: State, target: State, mesh: tuple[int, ...], caps: tuple[int, ...]) -> list[Move]:
    """Search for the path between two states with A*, for meshes with too many states for a table."""
    number = (len(caps) + 2) ** len(mesh)
    if number <= _LARGEST_TRIED:
        path = _walk(source, target, mesh, caps, None, _MOST_TAKEN if number > _LARGEST_SEARCH else number)
        if path is not None:
            return path
    allowed = [{source[d], target[d], REPLICATE} for d in range(len(mesh))]
    path = _walk(source, target, mesh, caps, allowed, number)
    assert path is not None, "all-gathers and slices lead everywhere"
    return path


def _walk(
    source: State,
    target: State,
    mesh: tuple[int, ...],
    caps: tuple[int, ...],
    allowed: Sequence[set[int]] | None,
    most_taken: int,
) -> list[Move] | None:
    """Return the cheapest moves through the placements ``allowed`` on each mesh dim (None: all); ``None`` after
    ``most_taken`` visited states."""
    remaining = _remaining(target, mesh, len(caps))
    taken = 0
    best: dict[State, float] = {source: 0.0}
    back: dict[State, tuple[State, Move]] = {}
    queue: list[tuple[float, float, State]] = [(0.0, 0.0, source)]
    while queue:
        _, moved, state = heapq.heappop(queue)
        if state == target:
            break
        if moved > best[state]:
            continue
        taken += 1
        if taken > most_taken:
            return None
        for move, after, more in _transitions(state, mesh, caps):
            if allowed is not None and any(p not in held for p, held in zip(after, allowed, strict=True)):
                continue
            total = moved + more + _STEP
            if total < best.get(after, math.inf) - _LESS:
                best[after], back[after] = total, (state, move)
                heapq.heappush(queue, (total + remaining.at_least(after), total, after))
    path: list[Move] = []
    at = target
    while at != source:
        at, move = back[at]
        path.append(move)
    return path[::-1]


@lru_cache(maxsize=1 << 12)
def _remaining(target: State, mesh: tuple[int, ...], num_dims: int) -> Remaining:
    """Return the bound of all searches to ``target``, with a cache of its results."""
    return Remaining(target, mesh, num_dims)


@lru_cache(maxsize=1 << 14)
def _transitions(state: State, mesh: tuple[int, ...], caps: tuple[int, ...]) -> tuple[tuple[Move, State, float], ...]:
    """Return ``transitions``, cached for many searches on one mesh."""
    return tuple(transitions(state, mesh, caps))
