"""Recompute choices of the ranks after every move from one placement, priced all at once.

A move shifts boundaries i to j, so most ranks hold the same layers afterwards, and those that do not hold one of a few
collections. Tables of these collections change only on the ranks that the last move changed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy

from mindspeed_autoparallel.planner.split.heuristics.candidates import Evaluator
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array

_LEFT, _RIGHT = 1, 2
"""Bits of a pattern: which boundaries of a virtual stage the move shifts."""
_MOST_HASH = 2**50
"""Bound of hashes: sums over ``MOST_LAYERS`` layers are exact in 64 bits."""


class _Table(NamedTuple):
    """What one rank may hold after a move: an entry for every pattern of shifted boundaries, in either direction."""

    ways: Array
    """``[way, chunk]``: added backward times; the ways of an entry are adjacent."""
    count: Array
    """Ways by entry; one of 0 for an entry that does not fit."""
    is_changed: Array
    """By entry: whether the rank holds other layers."""
    penalty: Array
    """By entry: 0, or infinite if its layers do not fit."""


class RankMoves:
    """Prices the recomputation of all moves from one placement."""

    def __init__(self, evaluator: Evaluator, shifts: Array) -> None:
        """List the patterns of ``shifts``, ``[move, num_virtual + 1]``: boundaries shifted by 1, then the same by
        -1."""
        problem = evaluator.problem
        self._evaluator, self._row = evaluator, evaluator.row
        self._size, self._chunks = problem.num_stages, problem.num_chunks
        shifted = (shifts[: len(shifts) // 2] != 0).astype(numpy.int64)
        pattern = _LEFT * shifted[:, :-1] + _RIGHT * shifted[:, 1:]
        digits: Array = 4 ** numpy.arange(self._chunks)[:, None]
        number = (pattern.reshape(len(shifted), self._chunks, self._size) * digits).sum(axis=1)
        self._patterns: list[list[list[int]]] = []
        entries, first = list[Array](), 0
        for rank in range(self._size):
            some, which = numpy.unique(number[:, rank], return_inverse=True)
            self._patterns.append([[number >> 2 * c & 3 for c in range(self._chunks)] for number in some.tolist()])
            which = which.reshape(-1)
            entries.append(first + numpy.concatenate([which, which + len(some)]))
            first += 2 * len(some)
        self._entry: Array = numpy.stack(entries, axis=1)
        """``[move, rank]``: the entry of what the rank holds after the move."""
        self._rank_of_entry: Array = numpy.repeat(
            numpy.arange(self._size), [2 * len(patterns) for patterns in self._patterns]
        )
        hashes = numpy.random.default_rng(0).integers(1, _MOST_HASH, len(problem.segments), dtype=numpy.int64)
        self._hashed: Array = self._row.counts @ hashes
        """Hash of the layers before every place of the row."""
        self._layer: Array = numpy.diff(self._hashed, prepend=0, append=self._hashed[-1])
        """``_layer[i]``: hash of the layer before place i, 0 at the beginning; that of the last entry is 0."""
        self._known: dict[tuple[int, tuple[int, ...]], Array] = {}
        self._tables: dict[tuple[int, object], _Table] = {}
        self._now: list[object] = [None] * self._size
        self._here: list[_Table] = []
        self._costs: Array = numpy.zeros(0)

    def go_to(self, ends: Array, extra: Array) -> None:
        """Move to a placement that fits: boundaries, and the added backward time of every virtual stage."""
        self.ends, self.extra = ends, extra
        low, high = ends[:-1], ends[1:]
        self._held: Array = numpy.diff(self._hashed[ends])
        sides = (self._held, self._layer[low], self._layer[low + 1], self._layer[high], self._layer[high + 1], extra)
        state = numpy.stack([*sides, high - low], axis=1)
        before, self._now = self._now, [state[rank :: self._size].tobytes() for rank in range(self._size)]
        changed = [rank for rank in range(self._size) if self._now[rank] != before[rank]]
        if not changed:
            return
        tables = dict(enumerate(self._here))
        for rank in changed:
            key = rank, self._now[rank]
            if key not in self._tables:
                self._tables[key] = self._table(rank, state[rank :: self._size].tolist())
            tables[rank] = self._tables[key]
        self._here = [tables[rank] for rank in range(self._size)]
        self._ways = numpy.concatenate([table.ways for table in self._here])
        count = numpy.concatenate([table.count for table in self._here])
        self._first: Array = numpy.cumsum(count) - count
        self._last: Array = self._first + count
        self._is_changed = numpy.concatenate([table.is_changed for table in self._here])
        self._penalty = numpy.concatenate([table.penalty for table in self._here])
        self._rank_of_way: Array = numpy.repeat(numpy.arange(self._size), [len(table.ways) for table in self._here])

    def costs(self, prices: Array) -> Array:
        """Return the rise of recomputation's cost by move, infinite for moves that do not fit. ``prices``: of a tick,
        by virtual stage."""
        by_rank = prices.reshape(self._chunks, self._size).T
        here = (self.extra.reshape(self._chunks, self._size).T * by_rank).sum(axis=1)
        self._costs = (self._ways * by_rank[self._rank_of_way]).sum(axis=1)
        least = numpy.minimum.reduceat(self._costs, self._first) - here[self._rank_of_entry] + self._penalty
        found: Array = least[self._entry].sum(axis=1)
        return found

    def extras(self, moves: Array) -> Array:
        """Return added backward times after each of ``moves``, the cheapest ones under the last prices."""
        found: Array = numpy.repeat(self.extra[None], len(moves), axis=0)
        entries = self._entry[moves]
        move, rank = numpy.nonzero(self._is_changed[entries])
        chosen = entries[move, rank]
        places = zip(
            move.tolist(), rank.tolist(), self._first[chosen].tolist(), self._last[chosen].tolist(), strict=True
        )
        for at, here, first, last in places:
            found[at, here :: self._size] = self._ways[first + int(self._costs[first:last].argmin())]
        return found

    def cheaper_ways(self, prices: Array) -> Array:
        """Return added backward times with the cheapest choice of one rank, for every rank that has a cheaper one."""
        rows, unshifted = list[Array](), [0] * self._chunks
        for rank in range(self._size):
            held = tuple(self._held[rank :: self._size].tolist())
            ways, mine = self._after(rank, held, unshifted, 0), prices[rank :: self._size]
            costs = ways @ mine
            if costs.min() < self.extra[rank :: self._size] @ mine:
                rows.append(self.extra.copy())
                rows[-1][rank :: self._size] = ways[int(costs.argmin())]
        return numpy.array(rows, dtype=numpy.int64).reshape(len(rows), len(self.extra))

    def _table(self, rank: int, state: list[list[int]]) -> _Table:
        """Return the table of a rank. ``state``: by chunk, hashes of its layers and of those at either side of its
        boundaries, its recomputation, and its number of layers."""
        ways, is_changed, penalty = list[Array](), list[bool](), list[float]()
        now = tuple(chunk[0] for chunk in state)
        extra: Array = numpy.array([[chunk[5] for chunk in state]])
        for step in (1, -1):
            for pattern in self._patterns[rank]:
                held, fits = list[int](), True
                for (layers, before, first, last, after, _, number), code in zip(state, pattern, strict=True):
                    left, right = code & _LEFT, code & _RIGHT
                    layers -= (first if step > 0 else -before) if left else 0
                    layers += (after if step > 0 else -last) if right else 0
                    number += step * (bool(right) - bool(left))
                    fits &= number >= self._row.least_per_stage
                    held.append(layers)
                is_changed.append(tuple(held) != now)
                found = extra
                if fits and is_changed[-1]:
                    found = self._after(rank, tuple(held), pattern, step)
                penalty.append(0.0 if fits and len(found) else numpy.inf)
                ways.append(found if len(found) else extra)
        return _Table(
            numpy.concatenate(ways), numpy.array([*map(len, ways)]), numpy.array(is_changed), numpy.array(penalty)
        )

    def _after(self, rank: int, held: tuple[int, ...], pattern: list[int], step: int) -> Array:
        """Return the choices of a rank with hashes ``held`` after the boundaries of ``pattern`` shift by ``step``."""
        key = rank, held
        if key not in self._known:
            v = numpy.arange(rank, len(self.extra), self._size)
            low = self.ends[v] + step * numpy.array([code & _LEFT for code in pattern])
            high = self.ends[v + 1] + step * numpy.array([(code & _RIGHT) // _RIGHT for code in pattern])
            self._known[key] = self._evaluator.extras_of(rank, self._row.counts[high] - self._row.counts[low])
        return self._known[key]
