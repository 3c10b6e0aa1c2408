"""All undominated recompute choices of many collections of layers of one rank at once.

Choices are multiplied out chunk by chunk for all collections together. Combinations that cannot fit are dropped on the
way; dominated choices of the same layers are dropped at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy

from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.rank_kinds import Held, RankKinds, placement_of_ways
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array, Edges
from mindspeed_autoparallel.planner.split.model.solution import Placement


@dataclass(frozen=True)
class ManyWays:
    """The recompute choices that fit, in the order of the collections."""

    owner: Array
    """Index of every way's collection."""
    extra: Array
    """``[way, chunk]``: added backward time."""
    chosen: Array
    """``[way, chunk]``: indices into ``choices``."""
    choices: tuple[list[tuple[Edges, ...]], ...]

    def edges(self, way: int) -> list[tuple[Edges, ...]]:
        """Return by chunk and stack held where each kind's layers begin."""
        return [edges[place] for edges, place in zip(self.choices, self.chosen[way].tolist(), strict=True)]


class _Choices(NamedTuple):
    """Recompute choices of one virtual stage's layers."""

    memory: Array
    saved: Array
    extra: Array
    transient: Array
    edges: list[tuple[Edges, ...]]


class AllRankWays:
    """Recompute choices of ranks; those of every virtual stage are cached."""

    def __init__(self, problem: SplitProblem) -> None:
        self.problem = problem
        self.kinds = RankKinds(problem, at_all_moments=not self.differ_in_one)
        self._choices: dict[tuple[int, Held], _Choices] = {}

    @property
    def differ_in_one(self) -> bool:
        """Return whether kinds differ in static or in saved memory, not in both: fronts at the fullest moment then have
        every undominated choice."""
        kinds = [(kind, s.kinds[0]) for s in self.problem.segments for kind in s.kinds]
        return all(a.memory == b.memory for a, b in kinds) or all(a.saved == b.saved for a, b in kinds)

    def of(self, rank: int, held: Array, most: int) -> ManyWays | None:
        """Return the ways of every collection, ``held[collection, chunk, segment]``; ``None`` if there are more than
        ``most`` combinations to compare."""
        tables = [self._table(rank, chunk, held[:, chunk]) for chunk in range(self.problem.num_chunks)]
        # Least memory of the chunks not yet combined.
        rest = sum(table.least[table.kind] for table in tables)
        owner: Array = numpy.arange(len(held))
        used: Array = numpy.zeros_like(rest)
        peak: Array = numpy.zeros_like(owner)
        chosen: Array = numpy.zeros((len(held), 0), dtype=numpy.int64)
        for table in tables:
            rest = rest - table.least[table.kind]
            count = table.count[table.kind[owner]]
            if count.sum() > most:
                return None
            parent: Array = numpy.repeat(numpy.arange(len(owner)), count)
            place = numpy.arange(len(parent)) - numpy.repeat(numpy.cumsum(count) - count, count)
            choice = table.first[table.kind[owner[parent]]] + place
            used, owner = used[parent] + table.used[choice], owner[parent]
            peak = numpy.maximum(peak[parent], table.transient[choice])
            fits = (used + rest[owner] + peak[:, None] <= self.problem.memory_limit[rank]).all(axis=1)
            chosen = numpy.concatenate([chosen[parent], choice[:, None]], axis=1)[fits]
            used, owner, peak = used[fits], owner[fits], peak[fits]
        extra = numpy.stack([table.extra[chosen[:, chunk]] for chunk, table in enumerate(tables)], axis=1)
        kept = _undominated(owner, extra)
        return ManyWays(owner[kept], extra[kept], chosen[kept], tuple(table.edges for table in tables))

    def placement(self, held: Array, extra: Array, most: int) -> Placement:
        """Return the placement that holds these layers, ``[virtual stage, segment]``, with this added backward time by
        virtual stage; ``of`` must have returned such ways for every rank."""
        size, ways = self.problem.num_stages, list[ManyWays]()
        for rank in range(size):
            found = self.of(rank, held[rank::size][None], most)
            assert found is not None  # it was among those compared
            ways.append(found)
        return placement_of_ways(self.problem, held, extra, ways)

    def _table(self, rank: int, chunk: int, held: Array) -> _Table:
        rows, kind = numpy.unique(held, axis=0, return_inverse=True)
        moments = numpy.array(self.problem.moments(rank))[:, chunk]
        choices = [self._choices_of(rank + chunk * self.problem.num_stages, tuple(row)) for row in rows.tolist()]
        used = [each.memory[:, None] + each.saved[:, None] * moments for each in choices]
        count = numpy.array(list(map(len, used)))
        return _Table(
            kind=kind.reshape(-1),
            count=count,
            first=numpy.cumsum(count) - count,
            least=numpy.array([each.min(axis=0) for each in used]),
            used=numpy.concatenate(used),
            extra=numpy.concatenate([each.extra for each in choices]),
            transient=numpy.concatenate([each.transient for each in choices]),
            edges=[edges for each in choices for edges in each.edges],
        )

    def _choices_of(self, v: int, held: Held) -> _Choices:
        """Return the choices of a virtual stage that no other one dominates in memory, time and transient."""
        if (v, held) not in self._choices:
            kinds = [s.kinds for s, count in zip(self.problem.segments, held, strict=True) if count]
            peaks = sorted({kind.transient for row in kinds for kind in row}) or [0]
            fronts = [self.kinds.front(v, held, peak) for peak in peaks]
            memory, saved, extra = (
                numpy.concatenate([getattr(front, name) for front in fronts]) for name in ("memory", "saved", "extra")
            )
            transient: Array = numpy.repeat(peaks, [len(front.memory) for front in fronts])
            beaten: Array = numpy.tri(len(memory), k=-1, dtype=bool)
            for values in (memory, saved, extra):
                beaten &= values[:, None] >= values
            kept = numpy.flatnonzero(~beaten.any(axis=1))
            edges = [row for front in fronts for row in front.edges]
            self._choices[v, held] = _Choices(
                memory[kept], saved[kept], extra[kept], transient[kept], [edges[place] for place in kept]
            )
        return self._choices[v, held]


@dataclass(frozen=True, kw_only=True)
class _Table:
    """The choices of one chunk for all collections; those for the same layers are adjacent."""

    kind: Array
    """Index of every collection's layers among the distinct ones."""
    count: Array
    first: Array
    """By distinct layers: ``count`` is the number of choices, ``first`` the index of the first one."""
    least: Array
    """``[distinct layers, moment]``: least memory over the choices."""
    used: Array
    """``[choice, moment]``: memory."""
    extra: Array
    transient: Array
    edges: list[tuple[Edges, ...]]


def _undominated(owner: Array, extra: Array) -> Array:
    """Return indices of the ways that no other way of the same owner dominates, in the order of owners."""
    left = numpy.lexsort((extra.sum(axis=1), owner))
    kept: list[Array] = []
    while len(left):
        first = numpy.flatnonzero(numpy.diff(owner[left], prepend=-1))
        best: Array = numpy.repeat(left[first], numpy.diff(numpy.append(first, len(left))))
        kept.append(left[first])
        left = left[(extra[left] < extra[best]).any(axis=1)]
    every = numpy.concatenate([left, *kept])
    ordered: Array = every[numpy.argsort(owner[every], kind="stable")]
    return ordered
