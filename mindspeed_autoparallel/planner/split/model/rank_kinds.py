"""Recompute choices for the layers of one rank with several chunks, which share its memory.

Of all choices ("ways") that fit, the Pareto front over the chunks' added backward times is kept. Which of them is best
depends on the rest of the pipeline, so the search tries them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy

from mindspeed_autoparallel.planner.split.model.problem import LayerKind, SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import (
    Array,
    Edges,
    Rows,
    edges_of_a_row,
    rows_of_kinds,
    stacks_held,
    sum_over_kinds,
)
from mindspeed_autoparallel.planner.split.model.solution import Placement, placement_of
from mindspeed_autoparallel.planner.split.settings import SETTINGS

_MANY_WAYS = 4096
"""Number of ways of one stack on a stage above which dominated ones are dropped early: about 90 layers of three
kinds."""
Held = tuple[int, ...]
"""Number of layers of one virtual stage, by segment."""


@dataclass(frozen=True)
class _Front:
    """Recompute choices of one virtual stage, with increasing memory and decreasing time."""

    memory: Array
    saved: Array
    extra: Array
    edges: tuple[tuple[Edges, ...], ...]
    """By way, for every stack held: where each kind's layers begin."""

    def thinned(self, number: int) -> _Front:
        if len(self.memory) <= number:
            return self
        kept: Array = numpy.unique(numpy.linspace(0, len(self.memory) - 1, number).round().astype(int))
        edges = tuple(self.edges[int(place)] for place in kept)
        return _Front(self.memory[kept], self.saved[kept], self.extra[kept], edges)


@dataclass(frozen=True)
class RankWays:
    """The recompute choices of one rank; empty if its layers do not fit."""

    extra: Array
    """``[way, chunk]``: added backward time."""
    fronts: tuple[tuple[tuple[_Front, ...], Array], ...]
    """By way: the fronts of the chunks, and the place of the way in each."""
    complete: bool = True
    """Whether the whole Pareto front is here: nothing was dropped to limit the number of ways."""

    def edges(self, way: int) -> list[tuple[Edges, ...]]:
        """Return by chunk and stack held where each kind's layers begin."""
        fronts, chosen = self.fronts[way]
        return [front.edges[place] for front, place in zip(fronts, chosen.tolist(), strict=True)]


class RankKinds:
    """Recompute choices of ranks, cached."""

    def __init__(self, problem: SplitProblem, *, at_all_moments: bool = False) -> None:
        """``at_all_moments``: fronts compare memory also when the fewest microbatches are in flight."""
        self.problem, self._at_all_moments = problem, at_all_moments
        self._ways: dict[tuple[int, tuple[Held, ...]], RankWays] = {}
        self._fronts: dict[tuple[int, Held, int], _Front] = {}

    def ways(self, rank: int, held: tuple[Held, ...]) -> RankWays:
        """Return the recompute choices of a rank whose chunks hold the layers ``held``."""
        key = (rank, held)
        if key not in self._ways:
            self._ways[key] = self._find(rank, held)
        return self._ways[key]

    def placement(self, held: Array, extra: Array) -> Placement:
        """Return the placement that holds these layers, ``[virtual stage, segment]``, with this added backward time by
        virtual stage."""
        size = self.problem.num_stages
        rows = [tuple(row) for row in held.tolist()]
        ways = [self.ways(rank, tuple(rows[rank::size])) for rank in range(size)]
        return placement_of_ways(self.problem, held, extra, ways)

    def _find(self, rank: int, held: tuple[Held, ...]) -> RankWays:
        extras: list[Array] = [numpy.zeros((0, self.problem.num_chunks), dtype=numpy.int64)]
        chosen: list[tuple[tuple[_Front, ...], Array]] = []
        complete = True
        segments = self.problem.segments
        present = {k for row in held for k, count in enumerate(row) if count}
        for peak in sorted({kind.transient for k in present for kind in segments[k].kinds}) or [0]:
            fronts = tuple(
                self.front(rank + chunk * self.problem.num_stages, row, peak) for chunk, row in enumerate(held)
            )
            if all(len(front.memory) for front in fronts):
                most = int(SETTINGS.ways_most_combined ** (1 / max(1, len(fronts) - 1)))
                complete &= all(len(front.memory) <= most for front in fronts[:-1])
                fronts = (*(front.thinned(most) for front in fronts[:-1]), fronts[-1])
                ways = self._combined(rank, fronts, self.problem.memory_limit[rank] - peak)
                extras.append(numpy.stack([front.extra[ways[:, c]] for c, front in enumerate(fronts)], axis=1))
                chosen += [(fronts, way) for way in ways]
            if not extras[-1].any(axis=1).all():
                # A way without recomputation exists: higher transients cannot give a better one.
                break
        every = numpy.concatenate(extras)
        kept = _undominated(every)
        return RankWays(every[kept], tuple(chosen[k] for k in kept), complete and len(kept) < SETTINGS.ways_most_ways)

    def _combined(self, rank: int, fronts: tuple[_Front, ...], room: int) -> Array:
        """Return places in the fronts that fit together, ``[way, chunk]``: all combinations of the other chunks, each
        with the fastest choice of the last chunk."""
        moments = numpy.array(self.problem.moments(rank))
        *others, last = fronts
        sizes = [len(front.memory) for front in others]
        grid: Array = numpy.indices(sizes).reshape(len(others), math.prod(sizes)).T
        used: Array = numpy.zeros((len(grid), len(moments)), dtype=numpy.int64)
        for chunk, front in enumerate(others):
            each = front.memory[:, None] + front.saved[:, None] * moments[:, chunk]
            used += each[grid[:, chunk]]
        each = last.memory[:, None] + last.saved[:, None] * moments[:, -1]
        fits = (used[:, None, :] + each[None, :, :] <= room).all(axis=2)
        # Fronts fall in time, so the last choice that fits is the fastest.
        place = fits.shape[1] - 1 - fits[:, ::-1].argmax(axis=1)
        which = fits.any(axis=1)
        return numpy.concatenate([grid[which], place[which][:, None]], axis=1)

    def front(self, v: int, held: Held, peak: int) -> _Front:
        key = (v, held, peak)
        if key not in self._fronts:
            nothing: Array = numpy.zeros(1, dtype=numpy.int64)
            front = _Front(nothing, nothing, nothing, ((),))
            for group in stacks_held(self.problem, held):
                front = _product(front, self._group_front(group, held, v, peak), self._in_flight(v))
            self._fronts[key] = front
        return self._fronts[key]

    def _group_front(self, group: tuple[int, ...], held: Held, v: int, peak: int) -> _Front:
        segments = [self.problem.segments[k] for k in group]
        counts = [held[k] for k in group]
        edges = edges_of_a_row(sum(counts), len(segments[0].kinds))
        edges = edges[sum_over_kinds(segments, counts, edges, lambda kind: kind.transient > peak) == 0]
        values: tuple[Callable[[LayerKind], int], ...] = (
            lambda kind: kind.memory[v],
            lambda kind: kind.saved,
            lambda kind: kind.extra_backward,
        )
        memory, saved, extra = (sum_over_kinds(segments, counts, edges, value) for value in values)
        if len(edges) > _MANY_WAYS:
            # The product would also drop dominated ways, but only after building all combinations.
            kept = _undominated_choices(memory, saved, extra, self._in_flight(v))
            edges, memory, saved, extra = edges[kept], memory[kept], saved[kept], extra[kept]
        return _Front(memory, saved, extra, tuple((tuple(row),) for row in edges.tolist()))

    def _in_flight(self, v: int) -> tuple[int, int]:
        """Return the fewest and the most microbatches in flight at the moments that fronts compare."""
        each = [moment[v // self.problem.num_stages] for moment in self.problem.moments(v % self.problem.num_stages)]
        return min(each) if self._at_all_moments else max(each), max(each)


def _product(left: _Front, right: _Front, in_flight: tuple[int, int]) -> _Front:
    """Return the Pareto front of the combinations of both."""
    a: Array = numpy.repeat(numpy.arange(len(left.memory)), len(right.memory))
    b: Array = numpy.tile(numpy.arange(len(right.memory)), len(left.memory))
    memory, saved = left.memory[a] + right.memory[b], left.saved[a] + right.saved[b]
    extra = left.extra[a] + right.extra[b]
    kept = _undominated_choices(memory, saved, extra, in_flight).tolist()
    edges = tuple((*left.edges[a[k]], *right.edges[b[k]]) for k in kept)
    return _Front(memory[kept], saved[kept], extra[kept], edges)


def _undominated_choices(memory: Array, saved: Array, extra: Array, in_flight: tuple[int, int]) -> Array:
    """Return indices of the Pareto front over added time and memory with the fewest and the most in flight; memory is
    linear in between."""
    least, whole = (memory + number * saved for number in in_flight)
    if in_flight[0] == in_flight[1]:
        return _least(whole, extra)
    left, kept = numpy.lexsort((extra, least, whole)), list[int]()
    while len(left):
        kept.append(int(left[0]))
        left = left[(least[left] < least[left[0]]) | (extra[left] < extra[left[0]])]
    return numpy.array(kept)


def _least(whole: Array, extra: Array) -> Array:
    """Return indices of the Pareto front over memory and added time, least memory first."""
    order = numpy.lexsort((extra, whole))
    sorted_extra = extra[order]
    better: Array = numpy.ones(len(order), dtype=bool)
    better[1:] = sorted_extra[1:] < numpy.minimum.accumulate(sorted_extra)[:-1]
    kept: Array = order[better]
    return kept


def _undominated(extras: Array) -> list[int]:
    """Return up to ``SETTINGS.ways_most_ways`` rows that no other row dominates, least sum first."""
    left = numpy.argsort(extras.sum(axis=1), kind="stable")
    kept: list[int] = []
    while len(left) and len(kept) < SETTINGS.ways_most_ways:
        kept.append(int(left[0]))
        left = left[(extras[left] < extras[kept[-1]]).any(axis=1)]
    return kept


class Ways(Protocol):
    """Interface: recompute choices of the layers of one rank."""

    @property
    def extra(self) -> Array:
        """``[way, chunk]``: added backward time."""
        ...

    def edges(self, way: int) -> list[tuple[Edges, ...]]:
        """Return by chunk and stack held where each kind's layers begin."""
        ...


def placement_of_ways(problem: SplitProblem, held: Array, extra: Array, ways: Sequence[Ways]) -> Placement:
    """Return the placement that holds these layers, ``[virtual stage, segment]``, and adds ``extra`` by virtual stage.

    ``ways``: the choices of every rank for these layers; they include ``extra``.
    """
    columns: list[Rows] = [()] * problem.num_virtual
    for rank, choices in enumerate(ways):
        way = int((choices.extra == extra[rank :: len(ways)]).all(axis=1).argmax())
        for chunk, edges in enumerate(choices.edges(way)):
            row = tuple(held[rank + chunk * len(ways)].tolist())
            columns[rank + chunk * len(ways)] = rows_of_kinds(problem, stacks_held(problem, row), row, edges)
    return placement_of(columns)
