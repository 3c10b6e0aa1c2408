"""The fastest recompute policy of a stage's layers among those that fit.

In a stack of several segments, a stage recomputes the first layers of the stack, as hosts do.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from mindspeed_autoparallel.planner.split.model.problem import LayerKind, Segment, SplitProblem, order_of_kinds

Array: TypeAlias = NDArray[Any]
Rows = tuple[tuple[int, ...], ...]
"""Number of layers by segment and kind."""
Edges = tuple[int, ...]
"""For a stack's layers on a stage, in order of kinds: where the layers of each kind begin, and the end of the last."""
Option = tuple[int, int, tuple[Edges, ...]]
"""Memory, added backward time, and edges of the stacks so far. Lists of options rise in memory and fall in time."""

_MOST_LAYERS_REMEMBERED = 256
"""Most layers of a stage whose divisions into kinds are cached; the size grows with the square for three kinds."""


class RecomputeChoice:
    """The fastest recompute choices of stages, cached."""

    def __init__(self, problem: SplitProblem) -> None:
        self.problem = problem
        self._fronts: dict[tuple[object, ...], list[Option]] = {}
        self._best: dict[tuple[int, tuple[int, ...]], tuple[int, Rows] | None] = {}

    def best(self, stage: int, held: tuple[int, ...]) -> tuple[int, Rows] | None:
        """Return the least added backward time of a stage with the layers ``held`` (by segment), and the layers by
        segment and kind; ``None`` if they do not fit."""
        key = (stage, held)
        if key not in self._best:
            self._best[key] = self._find(stage, held)
        return self._best[key]

    def _find(self, stage: int, held: tuple[int, ...]) -> tuple[int, Rows] | None:
        segments = self.problem.segments
        # The longest front comes last: it is searched by bisection instead of multiplied out.
        present = stacks_held(self.problem, held)
        present.sort(key=lambda group: (len(segments[group[0]].kinds) > 1, sum(held[k] for k in group)))
        best: Option | None = None
        for peak in self._transients(held):
            # A choice with a smaller transient counts with ``peak`` here, and exactly in its own iteration.
            room = self.problem.memory_limit[stage] - peak
            front: list[Option] = [(0, 0, ())] if room >= 0 else []
            for group in present[:-1]:
                front = _merge(front, self._front(group, held, stage, peak), room)
            if present:
                front = _best_pair(front, self._front(present[-1], held, stage, peak), room)
            if front and (best is None or front[0][1] < best[1]):
                best = front[0]
        if best is None:
            return None
        return best[1], rows_of_kinds(self.problem, present, held, best[2])

    def _transients(self, held: tuple[int, ...]) -> list[int]:
        segments = zip(self.problem.segments, held, strict=True)
        return sorted({kind.transient for segment, count in segments if count for kind in segment.kinds}) or [0]

    def _front(self, group: tuple[int, ...], held: tuple[int, ...], stage: int, peak: int) -> list[Option]:
        """Return the Pareto front over memory and time of a stack's layers, under kinds with a transient of at most
        ``peak``."""
        segments = [self.problem.segments[k] for k in group]
        counts = tuple(held[k] for k in group)
        usable = tuple(tuple(kind.transient <= peak for kind in segment.kinds) for segment in segments)
        key = (group, counts, stage, usable)
        if key not in self._fronts:
            self._fronts[key] = _ways(segments, counts, stage, peak)
        return self._fronts[key]


def _ways(segments: Sequence[Segment], counts: Sequence[int], stage: int, peak: int) -> list[Option]:
    """Return the Pareto front over memory and added time of all divisions of a stack's layers into kinds."""
    edges = edges_of_a_row(sum(counts), len(segments[0].kinds))
    values: tuple[Callable[[LayerKind], int], ...] = (
        lambda kind: kind.memory[stage],
        lambda kind: kind.extra_backward,
        lambda kind: kind.transient > peak,
    )
    memory, extra, refused = (sum_over_kinds(segments, counts, edges, value) for value in values)
    found: list[Option] = []
    for index in numpy.lexsort((extra, memory)):
        if not refused[index] and (not found or extra[index] < found[-1][1]):
            found.append((int(memory[index]), int(extra[index]), (tuple(edges[index].tolist()),)))
    return found


def sum_over_kinds(
    segments: Sequence[Segment], counts: Sequence[int], edges: Array, value: Callable[[LayerKind], int]
) -> Array:
    """Return ``value`` summed over the layers of a stack, for every division into kinds (row of ``edges``)."""
    result: Array = numpy.zeros(len(edges), dtype=numpy.int64)
    for place, q in enumerate(order_of_kinds(len(segments[0].kinds))):
        each: Array = numpy.repeat(numpy.array([int(value(s.kinds[q])) for s in segments], dtype=numpy.int64), counts)
        before = numpy.concatenate([[0], numpy.cumsum(each)])
        result += before[edges[:, place + 1]] - before[edges[:, place]]
    return result


def edges_of_a_row(total: int, num_kinds: int) -> Array:
    """Return every division of ``total`` layers into kinds in their order: ``[division, num_kinds + 1]`` edges."""
    few = total <= _MOST_LAYERS_REMEMBERED
    return _edges_of_a_row(total, num_kinds) if few else _edges_of_a_row.__wrapped__(total, num_kinds)


@functools.lru_cache(maxsize=1024)
def _edges_of_a_row(total: int, num_kinds: int) -> Array:
    cuts = itertools.combinations_with_replacement(range(total + 1), num_kinds - 1)
    return numpy.array([(0, *cut, total) for cut in cuts], dtype=numpy.int64)


def stacks_held(problem: SplitProblem, held: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the stacks with layers in ``held`` (layers by segment)."""
    return [group for group in problem.groups if any(held[k] for k in group)]


def rows_of_kinds(
    problem: SplitProblem, stacks: Sequence[tuple[int, ...]], held: Sequence[int], edges: Sequence[Edges]
) -> Rows:
    """Return the layers of one stage by segment and kind. ``edges``: by stack."""
    rows: list[tuple[int, ...]] = [(0,) * len(s.kinds) for s in problem.segments]
    for group, cut in zip(stacks, edges, strict=True):
        start = 0
        for k in group:
            rows[k] = _row_of_kinds(len(rows[k]), cut, start, start + held[k])
            start += held[k]
    return tuple(rows)


def _row_of_kinds(num_kinds: int, edges: Edges, start: int, end: int) -> tuple[int, ...]:
    """Return the number of layers of each kind among the layers ``start`` to ``end - 1`` of a stack."""
    row = [0] * num_kinds
    for q, (low, high) in zip(order_of_kinds(num_kinds), itertools.pairwise(edges), strict=True):
        row[q] = max(0, min(high, end) - max(low, start))
    return tuple(row)


def _merge(left: list[Option], right: list[Option], room: int) -> list[Option]:
    found: list[Option] = []
    for option in sorted(
        (a[0] + b[0], a[1] + b[1], (*a[2], *b[2])) for a in left for b in right if a[0] + b[0] <= room
    ):
        if not found or option[1] < found[-1][1]:
            found.append(option)
    return found


def _best_pair(left: list[Option], right: list[Option], room: int) -> list[Option]:
    """Return the fastest combination that fits as the only item of a list; an empty list if none fits."""
    sizes = [option[0] for option in right]
    best: Option | None = None
    for a in left:
        index = bisect_right(sizes, room - a[0]) - 1
        if index >= 0 and (best is None or a[1] + right[index][1] < best[1]):
            b = right[index]
            best = a[0] + b[0], a[1] + b[1], (*a[2], *b[2])
    return [] if best is None else [best]
