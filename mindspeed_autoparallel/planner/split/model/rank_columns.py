"""What one rank with several chunks may hold: every collection of whole layers, with every recomputation worth taking.

Memory, transients and tails are exact. The order of the row of layers is kept as far as one rank shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.planner.split.model.layer_row import LayerRow
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.rank_ways import AllRankWays
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.model.solution import tail_lengths
from mindspeed_autoparallel.planner.split.settings import SETTINGS


@dataclass(frozen=True, kw_only=True)
class RankColumns:
    """The columns of one rank."""

    held: Array
    """``[column, chunk, segment]``: layers."""
    counts: Array
    """``[column, segment]``: layers on all chunks."""
    lengths: Array
    """``[column, 2 * chunks + 1]``: forward times of the chunks, backward times with recomputation, tail."""

    def __len__(self) -> int:
        return len(self.held)


class ColumnLister:
    """Lists the columns of ranks."""

    def __init__(self, problem: SplitProblem) -> None:
        self.problem, self._ways = problem, AllRankWays(problem)
        row = LayerRow(problem)
        self._least, self._num_layers = row.least_per_stage, row.num_layers
        start, end = numpy.triu_indices(row.num_layers + 1, self._least)
        some, which = numpy.unique(row.counts[end] - row.counts[start], axis=0, return_inverse=True)
        self._some: Array = some
        which = which.reshape(-1)
        self._first_end: Array = numpy.full(len(self._some), row.num_layers)
        self._last_start: Array = numpy.zeros(len(self._some), dtype=numpy.int64)
        numpy.minimum.at(self._first_end, which, end)
        numpy.maximum.at(self._last_start, which, start)
        self._forward: Array = numpy.array([s.forward for s in problem.segments])
        self._backward: Array = numpy.array([s.backward for s in problem.segments])
        self._work: Array = self._some @ (self._forward + self._backward)

    def columns(self, rank: int, room: float) -> RankColumns | None:
        """Return all that a rank may hold whose work on all microbatches takes at most ``room`` ticks with its tail;
        ``None`` if it is too much to list, or choices are missing."""
        problem, size = self.problem, self.problem.num_stages
        if not self._ways.differ_in_one:
            return None
        chosen: Array = numpy.zeros((1, 0), dtype=numpy.int64)
        work: Array = numpy.zeros(1)
        most_work = room / problem.num_microbatches
        rest = self._work.min() * problem.num_chunks
        for chunk in range(problem.num_chunks):
            v = rank + chunk * size
            rest -= self._work.min()
            here = (self._last_start >= v * self._least) & (
                self._first_end <= self._num_layers - (problem.num_virtual - 1 - v) * self._least
            )
            sums = work[:, None] + self._work
            fits = here & (sums <= most_work - rest)
            if chunk:
                last = self._first_end[chosen[:, -1]] + (size - 1) * self._least
                fits &= last[:, None] <= self._last_start
            if fits.sum() > SETTINGS.columns_most_held:
                return None
            before, place = numpy.nonzero(fits)
            chosen, work = numpy.concatenate([chosen[before], place[:, None]], axis=1), sums[before, place]
        held = self._some[chosen]
        ways = self._ways.of(rank, held, SETTINGS.columns_most_ways)
        if ways is None:
            return None
        held = held[ways.owner]
        backward = held @ self._backward + ways.extra
        counts = held.sum(axis=1)
        tail = tail_lengths(problem.tails_at(rank), counts)[:, None]
        lengths = numpy.concatenate([held @ self._forward, backward, tail], axis=1).astype(float)
        kept = lengths[:, :-1].sum(axis=1) * problem.num_microbatches + lengths[:, -1] <= room
        if kept.sum() > SETTINGS.columns_most:
            return None
        return RankColumns(held=held[kept], counts=counts[kept], lengths=lengths[kept])
