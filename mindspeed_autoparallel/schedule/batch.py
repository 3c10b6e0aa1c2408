"""Replay of one program with many stage times at once: every level of the event graph is a few numpy operations.

A pair of combined 1F1B takes as long as its two passes, one after the other.

The graph is the exact simulator's own, so a row of results equals ``simulate`` on that row; with integers both are
exact up to 2**53. It is much faster than separate replays, because the interpreter visits a level of the graph once for
all candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from mindspeed_autoparallel.schedule.programs import Program
from mindspeed_autoparallel.schedule.simulator import compile_graph

Array: TypeAlias = NDArray[Any]
BYTES_AT_ONCE = 64 * 2**20
"""Bytes of end times per pass; more candidates need several passes."""


@dataclass(frozen=True)
class _Level:
    """Nodes that wait only for earlier levels: rows ``first`` to ``last`` of the end times."""

    first: int
    last: int
    waits: tuple[tuple[Array, Array], ...]
    """Up to three pairs: rows waited for, and the link between (the last link costs nothing)."""
    rows: Array
    """Rows of the nodes' durations; 0 for messages, which take no time."""
    microbatches: Array
    """The nodes' microbatches; 0 for messages."""


@dataclass(frozen=True)
class BatchPath:
    """The critical path of one candidate: its passes by virtual stage."""

    num_forwards: tuple[int, ...]
    num_backwards: tuple[int, ...]


class BatchSimulator:
    """Replays of one program and one kind of sends."""

    def __init__(self, program: Program, sends: str, link: Sequence[float], per_operation: float = 0) -> None:
        """Sort the events. ``link``: message time between virtual stages v and v + 1; empty: 0.

        Raises ``ConfigError`` for sends that the program's schedule does not support.
        """
        self.num_virtual = len(program) * (1 + max(action.chunk for action in program[0]))
        self._per_operation = per_operation
        self._link: Array = numpy.zeros(self.num_virtual)
        if len(link):
            self._link[:-1] = link
        self._levels, self._num_nodes, self._waits = _levels(program, sends)

    def step_times(self, forward: Array, backward: Array) -> Array:
        """Return the step time of every candidate. ``forward``, ``backward``: ``[candidate, virtual stage]``, or
        ``[candidate, virtual stage, microbatch]`` if microbatches differ."""
        parts = [slice(low, low + self.at_once) for low in range(0, len(forward), self.at_once)]
        found = [self._ends(self._durations(forward[part], backward[part])).max(axis=0) for part in parts]
        return numpy.concatenate(found) if found else numpy.zeros(0)

    @property
    def at_once(self) -> int:
        """Return the number of candidates per pass."""
        return max(1, BYTES_AT_ONCE // (8 * self._num_nodes))

    def critical_paths(self, forward: Array, backward: Array) -> tuple[Array, list[BatchPath]]:
        """Return step time and critical path of every candidate; meant for few candidates."""
        times, path_of = self.replay(forward, backward)
        return times, [path_of(index) for index in range(len(times))]

    def replay(self, forward: Array, backward: Array) -> tuple[Array, Callable[[int], BatchPath]]:
        """Return the step time of every candidate, in one pass, and a function for the critical path of one."""
        ends = self._ends(self._durations(forward, backward))
        return ends.max(axis=0), lambda index: self._path(ends[:, index].tolist(), int(ends[:, index].argmax()))

    def _durations(self, forward: Array, backward: Array) -> Array:
        """Return ``[row, microbatch or 1, candidate]``."""
        passes = [times if times.ndim == 3 else times[:, :, None] for times in (forward, backward)]
        durations = numpy.zeros((1 + 2 * self.num_virtual, passes[0].shape[2], len(forward)))
        for row, times in enumerate(passes, start=1):
            durations[row::2] = times.transpose(1, 2, 0)
        durations[1:] += self._per_operation
        return durations

    def _ends(self, durations: Array) -> Array:
        """Return ``[node, candidate]``: the end of every node."""
        ends = numpy.zeros((self._num_nodes, durations.shape[2]))
        all_equal = durations.shape[1] == 1
        for level in self._levels:
            out = ends[level.first : level.last]
            for place, (rows, links) in enumerate(level.waits):
                before = ends[rows]
                before += self._link[links][:, None]
                if place:
                    numpy.maximum(out, before, out=out)
                else:
                    out[:] = before
            out += durations[level.rows, 0 if all_equal else level.microbatches]
        return ends

    def _path(self, ends: list[float], node: int) -> BatchPath:
        link = self._link.tolist()
        forwards, backwards = [0] * self.num_virtual, [0] * self.num_virtual
        while node:
            row, waits = self._waits[node]
            if row:
                (backwards if row % 2 == 0 else forwards)[(row - 1) // 2] += 1
            if len(waits) == 1:
                node = waits[0][0]
            else:
                node = max(waits, key=lambda wait: ends[wait[0]] + link[wait[1]])[0]
        return BatchPath(tuple(forwards), tuple(backwards))


@lru_cache(maxsize=32)
def _levels(program: Program, sends: str) -> tuple[list[_Level], int, list[tuple[int, tuple[tuple[int, int], ...]]]]:
    """Return the graph's nodes renumbered by level, their number, and every node's duration row and waits."""
    graph = compile_graph(program, sends)
    depth = [0] * len(graph.waits)
    for node, (a, _, b, _, c, _) in enumerate(graph.waits):
        if node:
            depth[node] = 1 + max(depth[a], depth[b], depth[c])
    order = sorted(range(len(depth)), key=depth.__getitem__)
    place = {node: index for index, node in enumerate(order)}
    alone = {row: 2 + 2 * virtual for (_, virtual), row in graph.pairs.items()}
    waits: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    for node in order:
        a, link_a, b, link_b, c, link_c = graph.waits[node]
        pairs = {(place[a], link_a): None, (place[b], link_b): None, (place[c], link_c): None}
        if len(pairs) > 1:
            # The start, without a link, delays no node.
            pairs.pop((0, -1), None)
        waits.append((alone.get(graph.rows[node], graph.rows[node]), tuple(pairs)))
    works = [graph.work[node] for node in order]
    microbatches = [work[1].microbatch if work is not None else 0 for work in works]
    levels = []
    first = 1
    while first < len(order):
        last = first
        while last < len(order) and depth[order[last]] == depth[order[first]]:
            last += 1
        here = [waits[index][1] for index in range(first, last)]
        most = max(map(len, here))
        levels.append(
            _Level(
                first,
                last,
                tuple(
                    tuple(numpy.array([pairs[min(k, len(pairs) - 1)] for pairs in here]).T.copy()) for k in range(most)
                ),
                numpy.array([waits[index][0] for index in range(first, last)]),
                numpy.array([microbatches[index] for index in range(first, last)]),
            )
        )
        first = last
    return levels, len(order), waits
