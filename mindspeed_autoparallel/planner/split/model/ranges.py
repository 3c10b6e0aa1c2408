"""A chain as a layered graph: one node per (stage, layers done), one arc per range of layers that a stage may hold.

In a chain with one chunk per stage, each stage holds a range of layers. For each range only the recomputation with the
least added backward time that fits the stage's memory matters, since every schedule is monotone in stage times. A plan
is a path of this graph. See docs/decisions/0006-paths-of-ranges.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.planner.split.model.layer_row import is_one_row
from mindspeed_autoparallel.planner.split.model.problem import MOST_MEMORY, SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array as Array
from mindspeed_autoparallel.planner.split.model.recompute_choice import RecomputeChoice
from mindspeed_autoparallel.planner.split.model.solution import (
    Placement,
    held_times,
    placement_that_holds,
    tail_lengths,
)

NEVER = 2**60
UNUSABLE = 2 * MOST_MEMORY
"""Memory of a layer under a forbidden kind: more than all layers need, small enough for 64-bit sums."""
MOST_LAYERS = 600
"""Most layers of a chain; the number of ranges grows with its square."""


@dataclass
class Ranges:
    """The arcs of one stage, sorted by ``start``; each is the layers ``start`` to ``end - 1`` of the chain."""

    start: Array
    end: Array
    forward: Array
    backward: Array
    tail: Array

    def __len__(self) -> int:
        return len(self.start)

    def first(self) -> Array:
        """Return the index of the first arc of every start node with arcs."""
        return numpy.flatnonzero(numpy.diff(self.start, prepend=-1))

    def keep(self, mask: Array) -> None:
        self.start, self.end = self.start[mask], self.end[mask]
        self.forward, self.backward, self.tail = self.forward[mask], self.backward[mask], self.tail[mask]


def is_chain(problem: SplitProblem) -> bool:
    """Return whether every segment depends on all before it, with one chunk per stage and at most ``MOST_LAYERS``."""
    if problem.num_chunks > 1 or sum(segment.num_layers for segment in problem.segments) > MOST_LAYERS:
        return False
    return is_one_row(problem)


class Chain:
    """Ranges, counts and recomputation of one chain problem."""

    def __init__(self, problem: SplitProblem) -> None:
        self.problem = problem
        sizes = [segment.num_layers for segment in problem.segments]
        self.num_layers = sum(sizes)
        self.counts: Array = numpy.zeros((len(sizes), self.num_layers + 1), dtype=numpy.int64)
        """``[segment, i]``: layers of the segment among the first i of the chain."""
        at = 0
        for k, size in enumerate(sizes):
            self.counts[k, at + 1 : at + size + 1] = numpy.arange(1, size + 1)
            self.counts[k, at + size + 1 :] = size
            at += size
        self._broken = problem.breaks_joint(self.counts.T)
        self._start, self._end = self._allowed()
        self.choice = RecomputeChoice(problem)

    def _allowed(self) -> tuple[Array, Array]:
        """Return every range that a stage may hold: blocks beside their layers, joints whole, empty only if allowed."""
        problem, counts = self.problem, self.counts
        solid = counts[[k for k, s in enumerate(problem.segments) if s.beside is None]].sum(axis=0)
        start, end = numpy.triu_indices(self.num_layers + 1, 0 if problem.allow_empty_stages else 1)
        mask: Array = ~(self._broken[start] | self._broken[end])
        if not problem.allow_empty_stages:
            mask &= solid[end] > solid[start]
        for k, segment in enumerate(problem.segments):
            if segment.beside is not None:
                host = counts[segment.beside]
                mask &= counts[k][end] - counts[k][start] <= host[end] - host[start]
        return start[mask], end[mask]

    def roomiest(self) -> tuple[int, list[int]]:
        """Return the plan with the least overrun of its worst stage: the overrun (0 or less: it fits), and the layers
        placed up to each stage."""
        num = self.problem.num_stages
        held = (self.counts[:, self._end] - self.counts[:, self._start]).T
        first = numpy.flatnonzero(numpy.diff(self._start, prepend=-1))
        least = numpy.full(self.num_layers + 1, NEVER)
        least[-1] = -NEVER
        ways: list[Array] = []
        for stage in range(num - 1, -1, -1):
            used = self._least_memory(stage, held)
            ways.append(numpy.maximum(used - self.problem.memory_limit[stage], least[self._end]))
            least = numpy.full(self.num_layers + 1, NEVER)
            least[self._start[first]] = numpy.minimum.reduceat(ways[-1], first)
        node, ends = 0, list[int]()
        for way in reversed(ways):
            here = numpy.flatnonzero(self._start == node)
            node = int(self._end[here[numpy.argmin(way[here])]])
            ends.append(node)
        return int(least[0]), ends

    def _least_memory(self, stage: int, held: Array) -> Array:
        """Return the least memory of every range that a stage may hold, over all recompute choices."""
        segments = self.problem.segments
        used = numpy.full(len(held), NEVER)
        for peak in sorted({kind.transient for s in segments for kind in s.kinds}):
            layers: Array = numpy.zeros(len(held), dtype=numpy.int64)
            for group in self.problem.groups:
                layers += self._least_of_stack(stage, group, peak)
            used = numpy.minimum(used, layers + numpy.where(held.any(axis=1), peak, 0))
        return used

    def _least_of_stack(self, stage: int, group: tuple[int, ...], peak: int) -> Array:
        """Return by range the least memory of one stack's layers, under kinds whose transient is at most ``peak``.

        Kinds have a fixed order on a stage, so dynamic programming over layers needs only the last layer's kind:
        ``least[place, start]`` is the least memory from ``start`` on with the last kind at ``place`` or before.
        """
        segments = [self.problem.segments[k] for k in group]
        sizes = [
            [segment.kinds[q].memory[stage] if segment.kinds[q].transient <= peak else UNUSABLE for q in segment.order]
            for segment in segments
            for _ in range(segment.num_layers)
        ]
        before = int(self.counts[: group[0], -1].sum())
        least: Array = numpy.zeros((len(segments[0].kinds), len(sizes) + 1), dtype=numpy.int64)
        table: Array = numpy.zeros((len(sizes) + 1, len(sizes) + 1), dtype=numpy.int64)
        for end, each in enumerate(sizes, start=1):
            least[:, :end] += numpy.array(each)[:, None]
            least[:, :end] = numpy.minimum(numpy.minimum.accumulate(least[:, :end], axis=0), UNUSABLE)
            table[:end, end] = least[-1, :end]
        start, end = (numpy.clip(at - before, 0, len(sizes)) for at in (self._start, self._end))
        return table[start, end]

    def ranges(self, longest: int) -> list[Ranges]:
        """Return by stage every range that may fit and takes at most ``longest`` in a step without recomputation."""
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
        found: list[Ranges] = []
        for stage in range(problem.num_stages):
            least = numpy.array([min(kind.memory[stage] for kind in s.kinds) for s in problem.segments]) @ counts
            fits = least[end] - least[start] <= self.problem.memory_limit[stage]
            if stage == 0:
                fits &= start == 0
            if stage == problem.num_stages - 1:
                fits &= end == self.num_layers
            low, high = start[fits], end[fits]
            found.append(
                Ranges(
                    low,
                    high,
                    forward[high] - forward[low],
                    backward[high] - backward[low],
                    self._tails(stage, low, high),
                )
            )
        return found

    def recompute(self, stage: int, ranges: Ranges) -> None:
        """Drop ranges that do not fit the stage; add the least recomputation to the backward times of the others."""
        segments = self.problem.segments
        held = (self.counts[:, ranges.end] - self.counts[:, ranges.start]).T
        plain = numpy.array([s.kinds[0].memory[stage] for s in segments])
        transient = numpy.array([s.kinds[0].transient for s in segments])
        free = held @ plain + numpy.where(held > 0, transient, 0).max(axis=1) <= self.problem.memory_limit[stage]
        if any(s.kinds[0].extra_backward for s in segments):
            free[:] = False
        extra: Array = numpy.zeros(len(ranges), dtype=numpy.int64)
        for index in numpy.flatnonzero(~free):
            kinds = self.choice.best(stage, tuple(held[index].tolist()))
            extra[index] = NEVER if kinds is None else kinds[0]
        ranges.backward = ranges.backward + extra
        ranges.keep(extra < NEVER)

    def _tails(self, stage: int, start: Array | int, end: Array | int) -> Array:
        """Return the tail of a stage with each range."""
        return tail_lengths(self.problem.tails_at(stage), (self.counts[:, end] - self.counts[:, start]).T)

    def times(self, stage: int, start: int, end: int) -> tuple[int, int, int] | None:
        """Return forward, backward (with the least recomputation) and tail times; ``None`` if the stage cannot hold the
        range."""
        if not 0 <= start <= end <= self.num_layers or self._broken[start] or self._broken[end]:
            return None
        return held_times(self.choice, stage, tuple((self.counts[:, end] - self.counts[:, start]).tolist()))

    def placement(self, ends: list[int]) -> Placement:
        """Return the plan whose stage s holds the layers up to ``ends[s]``."""
        return placement_that_holds(self.choice, numpy.diff(self.counts[:, [0, *ends]], axis=1).T)

    def ends_of(self, placement: Placement) -> list[int]:
        """Return the number of layers placed up to each stage."""
        ends, done = list[int](), 0
        for stage in range(self.problem.num_stages):
            done += sum(row[stage] for rows in placement for row in rows)
            ends.append(done)
        return ends
