"""Whole layers and whole recomputation on every rank: the bound by mixtures of what ranks may hold, divided.

The linear relaxation recomputes fractions of layers, and moves them between the chunks of a rank. In tight memory and
with two layers a chunk that is far from any plan. Here the virtual stage that holds the end of a module is fixed in
turn, then the numbers of layers of virtual stages are divided until no mixture is within a target.
"""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.planner.split.bounds.rank_program import ROUNDING, Left, RankProgram, Start
from mindspeed_autoparallel.planner.split.bounds.whole_ranks import rank_cuts, rank_rooms
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.rank_columns import ColumnLister, RankColumns
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.schedule import BatchSimulator


@dataclass(order=True)
class _Part:
    """A part of the plans, with a lower bound of them."""

    bound: float
    number: int
    left: Left
    program: RankProgram | None = None


class RankMixture:
    """Bounds of one problem whose placements all are cuts of its row of layers."""

    def __init__(self, problem: SplitProblem, simulator: BatchSimulator) -> None:
        self.problem = problem
        self.programs = 0
        """Programs solved so far."""
        self._lister, self._simulator = ColumnLister(problem), simulator
        self._of_ranks = self._cuts = tuple(rank_cuts(problem))

    def bound(self, low: float, target: float, deadline: float, most_programs: float) -> float | None:
        """Return a lower bound of the step between ``low`` and ``target``; ``None`` if ranks may hold too much to list.

        ``most_programs``: most programs solved.
        """
        columns = self._columns(target)
        if columns is None:
            return None
        number, last = itertools.count(), self.programs + most_programs
        start = Start(self._cuts)
        parts = [_Part(low, next(number), left) for left in _by_junction(self.problem, columns)]
        while parts and parts[0].bound < target and self.programs < last and time.monotonic() < deadline:
            part = heapq.heappop(parts)
            if part.program is None:
                part.program = RankProgram(self.problem, columns, self._simulator, part.left, start)
                self.programs += 1
            program = part.program
            # All parts rise together, so that time well spent raises the least of their bounds.
            rise = SETTINGS.ranks_mixture_share * (target - low)
            enough = min(target, parts[0].bound + rise) if parts else target
            is_done = program.run(target, enough, deadline)
            start, part.bound = program.start(), max(part.bound, program.bound * (1 - ROUNDING))
            if part.bound < target:
                halves = [_Part(part.bound, next(number), left) for left in program.divided()] if is_done else [part]
                for half in halves:
                    if all(map(len, half.left)):
                        heapq.heappush(parts, half)
        self._cuts = tuple(dict.fromkeys([*self._of_ranks, *start.cuts]))
        return min(target, parts[0].bound) if parts else target

    def _columns(self, step: float) -> list[RankColumns] | None:
        rooms, found = rank_rooms(self.problem, step), dict[int, RankColumns]()
        # The last rank and those in the middle may hold most: where that is too much, little time is lost.
        for rank in dict.fromkeys((len(rooms) - 1, len(rooms) // 2, *range(len(rooms)))):
            columns = self._lister.columns(rank, rooms[rank])
            if columns is None:
                return None
            found[rank] = columns
        return [found[rank] for rank in range(len(rooms))]


def _by_junction(problem: SplitProblem, columns: list[RankColumns]) -> list[Left]:
    """Return the parts for every virtual stage that may hold the last layer before a boundary between segments, the one
    with most work on either side."""
    work: Array = numpy.cumsum([s.num_layers * (s.forward + s.backward) for s in problem.segments])
    sides = numpy.minimum(work, work[-1] - work)
    end = int(sides.argmax()) + 1
    parts: list[Left] = []
    for junction in range(problem.num_virtual) if sides.any() else ():
        left: Left = []
        for rank, each in enumerate(columns):
            v = numpy.arange(rank, problem.num_virtual, problem.num_stages)
            before, after = each.held[:, :, :end].any(axis=2), each.held[:, :, end:].any(axis=2)
            apart = ~after[:, v < junction].any(axis=1) & ~before[:, v > junction].any(axis=1)
            left.append(numpy.flatnonzero(apart & before[:, v == junction].all(axis=1)))
        parts.append(left)
    parts = parts or [[numpy.arange(len(each)) for each in columns]]
    return [left for left in parts if all(map(len, left))]
