"""A chain as a layered graph: one node per (stage, layers done), one arc per range of layers that a stage may hold.

For a chain with one chunk per stage the order of layers leaves each stage a range of them, and of all ways to recompute
a range only the one with the least added backward time that fits its stage's memory matters: every schedule is
monotone in stage times. A plan is a path of this graph. See docs/decisions/0019-paths-of-ranges.md.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy

from mindspeed_autoparallel.planner.split.problem import LayerKind, SplitProblem
from mindspeed_autoparallel.planner.split.solution import Placement

Array = Any
"""A numpy array."""
NEVER = 2**60
MOST_LAYERS = 600
"""Ranges grow with its square."""


@dataclass
class Ranges:
    """The arcs of one stage, sorted by ``start``: layers ``start`` to ``end - 1`` of the chain."""

    start: Array
    end: Array
    forward: Array
    backward: Array
    tail: Array

    def __len__(self) -> int:
        return len(self.start)

    def first(self) -> Array:
        """Index of the first arc of every start that has any."""
        return numpy.flatnonzero(numpy.diff(self.start, prepend=-1))

    def keep(self, mask: Array) -> None:
        self.start, self.end = self.start[mask], self.end[mask]
        self.forward, self.backward, self.tail = self.forward[mask], self.backward[mask], self.tail[mask]


def is_chain(problem: SplitProblem) -> bool:
    """Whether every segment waits for all before it, and stages hold one range each."""
    if problem.num_chunks > 1 or sum(segment.num_layers for segment in problem.segments) > MOST_LAYERS:
        return False
    known: list[set[int]] = []
    for index, segment in enumerate(problem.segments):
        known.append(set(segment.predecessors).union(*(known[before] for before in segment.predecessors)))
        if len(known[index]) < index:
            return False
    return True


class Chain:
    """Ranges, counts and recomputation of one chain problem."""

    def __init__(self, problem: SplitProblem) -> None:
        self.problem = problem
        sizes = [segment.num_layers for segment in problem.segments]
        self.num_layers = sum(sizes)
        self.counts: Array = numpy.zeros((len(sizes), self.num_layers + 1), dtype=numpy.int64)
        """``[segment, i]``: its layers among the first i of the chain."""
        at = 0
        for k, size in enumerate(sizes):
            self.counts[k, at + 1 : at + size + 1] = numpy.arange(1, size + 1)
            self.counts[k, at + size + 1 :] = size
            at += size
        self._start, self._end = self._allowed()
        self._fronts: dict[tuple[int, int, int, tuple[int, ...]], list[Option]] = {}
        self._kept: dict[tuple[int, tuple[int, ...]], tuple[int, tuple[tuple[int, ...], ...]] | None] = {}

    def _allowed(self) -> tuple[Array, Array]:
        """Every range that a stage may hold: not empty where that is forbidden, blocks with their layers."""
        problem, counts = self.problem, self.counts
        solid = counts[[k for k, s in enumerate(problem.segments) if s.beside is None]].sum(axis=0)
        start, end = numpy.triu_indices(self.num_layers + 1, 0 if problem.allow_empty_stages else 1)
        mask: Array = numpy.ones(len(start), dtype=bool)
        if not problem.allow_empty_stages:
            mask &= solid[end] > solid[start]
        for k, segment in enumerate(problem.segments):
            if segment.beside is not None:
                host = counts[segment.beside]
                mask &= counts[k][end] - counts[k][start] <= host[end] - host[start]
        return start[mask], end[mask]

    def roomiest(self) -> tuple[int, list[int]]:
        """The least overrun of any plan's worst stage (0 or less: it fits), and that plan's layers done by stage."""
        num = self.problem.num_stages
        held = (self.counts[:, self._end] - self.counts[:, self._start]).T
        first = numpy.flatnonzero(numpy.diff(self._start, prepend=-1))
        least = numpy.full(self.num_layers + 1, NEVER)
        least[-1] = -NEVER
        ways = []
        for stage in range(num - 1, -1, -1):
            used = numpy.full(len(held), NEVER)
            for peak in sorted({kind.transient for s in self.problem.segments for kind in s.kinds}):
                each = numpy.array([
                    min((kind.memory[stage] for kind in s.kinds if kind.transient <= peak), default=NEVER // 2**10)
                    for s in self.problem.segments
                ])  # fmt: skip
                used = numpy.minimum(used, held @ each + numpy.where(held.any(axis=1), peak, 0))
            ways.append(numpy.maximum(used - self._room(stage), least[self._end]))
            least = numpy.full(self.num_layers + 1, NEVER)
            least[self._start[first]] = numpy.minimum.reduceat(ways[-1], first)
        node, ends = 0, []
        for way in reversed(ways):
            here = numpy.flatnonzero(self._start == node)
            node = int(self._end[here[numpy.argmin(way[here])]])
            ends.append(node)
        return int(least[0]), ends

    def ranges(self, longest: int) -> list[Ranges]:
        """By stage: every range that could fit and keeps its stage busy for at most ``longest``, nothing recomputed."""
        problem, counts = self.problem, self.counts
        forward = numpy.array([s.forward for s in problem.segments]) @ counts
        backward = numpy.array([s.backward for s in problem.segments]) @ counts
        start, end = self._start, self._end
        mask = (
            problem.num_microbatches
            * (forward[end] - forward[start] + backward[end] - backward[start] + 2 * problem.per_operation)
            <= longest
        )
        start, end = start[mask], end[mask]
        found = []
        for stage in range(problem.num_stages):
            least = numpy.array([min(kind.memory[stage] for kind in s.kinds) for s in problem.segments]) @ counts
            fits = least[end] - least[start] <= self._room(stage)
            if stage == 0:
                fits &= start == 0
            if stage == problem.num_stages - 1:
                fits &= end == self.num_layers
            low, high = start[fits], end[fits]
            found.append(Ranges(
                low, high, forward[high] - forward[low], backward[high] - backward[low], self._tails(low, high)
            ))  # fmt: skip
        return found

    def _room(self, stage: int) -> int:
        problem = self.problem
        return problem.memory_limit[stage] - (problem.fixed_memory[stage] if problem.fixed_memory else 0)

    def recompute(self, stage: int, ranges: Ranges) -> None:
        """Drop what does not fit the stage, and add the least recomputation to what does."""
        segments = self.problem.segments
        held = (self.counts[:, ranges.end] - self.counts[:, ranges.start]).T
        plain = numpy.array([s.kinds[0].memory[stage] for s in segments])
        transient = numpy.array([s.kinds[0].transient for s in segments])
        free = held @ plain + numpy.where(held > 0, transient, 0).max(axis=1) <= self._room(stage)
        if any(s.kinds[0].extra_backward for s in segments):
            free[:] = False
        extra: Array = numpy.zeros(len(ranges), dtype=numpy.int64)
        for index in numpy.flatnonzero(~free):
            kinds = self.best_kinds(stage, tuple(held[index].tolist()))
            extra[index] = NEVER if kinds is None else kinds[0]
        ranges.backward = ranges.backward + extra
        ranges.keep(extra < NEVER)

    def _tails(self, start: Array, end: Array) -> Array:
        """What a stage with each range does after the pipeline."""
        held = self.counts[:, end] - self.counts[:, start]
        length: Array = numpy.zeros(numpy.shape(start), dtype=numpy.int64)
        for tail in self.problem.tails:
            ticks = numpy.array(tail.by_segment)
            fixed = numpy.where((ticks != 0) @ held > 0, tail.fixed, 0)
            length = numpy.maximum(length, ticks @ held + fixed)
        return length

    def best_kinds(self, stage: int, held: tuple[int, ...]) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
        """Least added backward time for these layers on this stage, and the layers by segment and kind."""
        key = (stage, held)
        if key not in self._kept:
            self._kept[key] = self._best_kinds(stage, held)
        return self._kept[key]

    def _best_kinds(self, stage: int, held: tuple[int, ...]) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
        segments = self.problem.segments
        present = [k for k, count in enumerate(held) if count]
        # Long fronts last: the last one is searched, not multiplied out.
        present.sort(key=lambda k: (len(segments[k].kinds) > 1, held[k]))
        transients = sorted({kind.transient for k in present for kind in segments[k].kinds}) or [0]
        best: Option | None = None
        for peak in transients:
            # Charging ``peak`` to plans that need less is made good by the smaller peaks' own turns.
            room = self._room(stage) - peak
            front: list[Option] = [(0, 0, ())] if room >= 0 else []
            for k in present[:-1]:
                front = _merge(front, self._spread(k, held[k], stage, peak), room)
            if present:
                front = _best_pair(front, self._spread(present[-1], held[present[-1]], stage, peak), room)
            if front and (best is None or front[0][1] < best[1]):
                best = front[0]
        if best is None:
            return None
        rows: list[tuple[int, ...]] = [(0,) * len(s.kinds) for s in segments]
        for k, row in zip(present, best[2], strict=True):
            rows[k] = row
        return best[1], tuple(rows)

    def _spread(self, segment: int, count: int, stage: int, peak: int) -> list[Option]:
        """The front of all ways to give a segment's ``count`` layers kinds of at most ``peak`` transient."""
        kinds = self.problem.segments[segment].kinds
        usable = tuple(q for q, kind in enumerate(kinds) if kind.transient <= peak)
        key = (segment, count, stage, usable)
        if key not in self._fronts:
            self._fronts[key] = _spread(kinds, usable, count, stage) if usable else []
        return self._fronts[key]

    def times(self, stage: int, start: int, end: int) -> tuple[int, int, int] | None:
        """Forward, backward (with the least recomputation) and tail; ``None``: the range cannot be on that stage."""
        segments = self.problem.segments
        if not 0 <= start <= end <= self.num_layers:
            return None
        held = tuple((self.counts[:, end] - self.counts[:, start]).tolist())
        if any(s.beside is not None and held[k] > held[s.beside] for k, s in enumerate(segments)):
            return None
        if not self.problem.allow_empty_stages and not any(
            count for count, segment in zip(held, segments, strict=True) if segment.beside is None
        ):
            return None
        kinds = self.best_kinds(stage, held)
        if kinds is None:
            return None
        forward = sum(count * segment.forward for count, segment in zip(held, segments, strict=True))
        backward = sum(count * segment.backward for count, segment in zip(held, segments, strict=True))
        return forward, backward + kinds[0], int(self._tails(start, end))

    def placement(self, ends: list[int]) -> Placement:
        """The plan whose stage s holds the layers up to ``ends[s]``."""
        columns = []
        for stage, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            held = tuple((self.counts[:, end] - self.counts[:, start]).tolist())
            kinds = self.best_kinds(stage, held)
            assert kinds is not None  # its range was kept
            columns.append(kinds[1])
        return tuple(
            tuple(tuple(column[k][q] for column in columns) for q in range(len(segment.kinds)))
            for k, segment in enumerate(self.problem.segments)
        )

    def ends_of(self, placement: Placement) -> list[int]:
        """Layers done after each stage."""
        ends, done = [], 0
        for stage in range(self.problem.num_stages):
            done += sum(row[stage] for rows in placement for row in rows)
            ends.append(done)
        return ends


Option = tuple[int, int, tuple[tuple[int, ...], ...]]
"""Memory, added backward time, layers by kind of each segment so far; fronts rise in memory and fall in time."""


def _spread(kinds: tuple[LayerKind, ...], usable: tuple[int, ...], count: int, stage: int) -> list[Option]:
    first, *others = usable
    ways = [(0, 0, (0,) * len(kinds), 0)]
    for q in others:
        ways = [
            (memory + n * kinds[q].memory[stage], extra + n * kinds[q].extra_backward,
             (*row[:q], n, *row[q + 1 :]), used + n)
            for memory, extra, row, used in ways for n in range(count - used + 1)
        ]  # fmt: skip
    plain = kinds[first]
    return _front([
        (memory + (count - used) * plain.memory[stage], extra + (count - used) * plain.extra_backward,
         ((*row[:first], count - used, *row[first + 1 :]),))
        for memory, extra, row, used in ways
    ])  # fmt: skip


def _merge(left: list[Option], right: list[Option], room: int) -> list[Option]:
    return _front([
        (a[0] + b[0], a[1] + b[1], (*a[2], *b[2])) for a in left for b in right if a[0] + b[0] <= room
    ])  # fmt: skip


def _best_pair(left: list[Option], right: list[Option], room: int) -> list[Option]:
    """The sum of least time, alone in its list, or nothing."""
    sizes = [option[0] for option in right]
    best: Option | None = None
    for a in left:
        index = bisect_right(sizes, room - a[0]) - 1
        if index >= 0 and (best is None or a[1] + right[index][1] < best[1]):
            b = right[index]
            best = a[0] + b[0], a[1] + b[1], (*a[2], *b[2])
    return [] if best is None else [best]


def _front(options: list[Option]) -> list[Option]:
    found: list[Option] = []
    for option in sorted(options):
        if not found or option[1] < found[-1][1]:
            found.append(option)
    return found
