"""The fastest mixture of what ranks may hold: a linear program by column generation, and the bound of its dual prices.

Every rank mixes columns, each a whole collection of layers that fits its memory. Dual prices give every segment's layer
a price and every cut a weight. Under them each rank chooses its cheapest column by itself, and the sum is a lower bound
of every plan. A column that would raise it above a target is in no plan within that target.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.linear import Duals, LinearProgram, centred
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.rank_columns import RankColumns
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.schedule import BatchSimulator

ROUNDING = 1e-9
"""Share of a bound by which floating point may raise it."""
Left = list[Array]
"""By rank: indices of the columns left."""


@dataclass(frozen=True)
class Start:
    """Cuts and columns, as (rank, column) pairs, from which a program starts."""

    cuts: tuple[Cut, ...]
    columns: tuple[tuple[int, int], ...] = ()


class RankProgram:
    """One program over the columns left on every rank; none of the ranks is without columns."""

    def __init__(
        self, problem: SplitProblem, columns: Sequence[RankColumns], simulator: BatchSimulator, left: Left, start: Start
    ) -> None:
        self._problem, self._columns, self._simulator, self.left = problem, columns, simulator, left
        # Scale times to about 1: solvers fail on large numbers.
        work = sum(s.num_layers * (s.forward + s.backward) for s in problem.segments)
        self._unit = max(1.0, work * problem.num_microbatches / problem.num_stages)
        self._program = LinearProgram("CLP")
        self._step: Any = self._program.number()
        self._program.solver.Minimize(self._step)
        self._once = [self._program.row(low=1, high=1) for _ in left]
        self._totals: Array = numpy.array([s.num_layers for s in problem.segments])
        self._counted = [self._program.row_with_slack(n, n, SETTINGS.mixture_missing) for n in self._totals.tolist()]
        self._cuts: dict[Cut, Any] = {}
        self._constants: Array = numpy.zeros(0)
        self._passes: list[Array] = [numpy.zeros((0, 2 * problem.num_chunks + 1)) for _ in left]
        """By rank, ``[cut, times and tail of a column]``: how often the cut's path takes each of them."""
        self._chosen: dict[tuple[int, int], Any] = {}
        self._best: Duals = (numpy.zeros(0), numpy.zeros(0))
        self._fastest: tuple[list[Array], float] | None = None
        """The fastest mixture simulated: by rank, times and tail; and its step."""
        self.bound = float("-inf")
        self._mixed: list[tuple[int, int, float]] = []
        """Rank, column and share of the columns in the last mixture."""
        for cut in start.cuts:
            self._add_cut(cut)
        kept = [set(which.tolist()) for which in left]
        for rank, column in start.columns:
            if column in kept[rank]:
                self._add_column(rank, column)
        for rank, which in enumerate(left):
            work_of = columns[rank].lengths[which].sum(axis=1)
            for place in (int(work_of.argmin()), int(work_of.argmax())):
                self._add_column(rank, int(which[place]))

    def _add_cut(self, cut: Cut) -> bool:
        if cut in self._cuts:
            return False
        size = self._problem.num_stages
        row = self._program.row([(1, self._step)], low=cut.constant / self._unit)
        passes = numpy.array([*cut.forwards, *cut.backwards], dtype=float)
        for rank in range(size):
            here: Array = numpy.append(passes[rank::size], float(cut.tail_stage == rank))
            self._passes[rank] = numpy.concatenate([self._passes[rank], here[None]])
        for (rank, column), variable in self._chosen.items():
            length = float(self._passes[rank][-1] @ self._columns[rank].lengths[column])
            row.SetCoefficient(variable, -length / self._unit)
        self._constants = numpy.append(self._constants, cut.constant)
        self._cuts[cut] = row
        return True

    def _add_column(self, rank: int, column: int) -> bool:
        if (rank, column) in self._chosen:
            return False
        variable = self._chosen[rank, column] = self._program.number()
        self._once[rank].SetCoefficient(variable, 1)
        for row, count in zip(self._counted, self._columns[rank].counts[column].tolist(), strict=True):
            row.SetCoefficient(variable, count)
        lengths = self._passes[rank] @ self._columns[rank].lengths[column] / self._unit
        for row, length in zip(self._cuts.values(), lengths.tolist(), strict=True):
            row.SetCoefficient(variable, -length)
        return True

    def run(self, target: float, enough: float, deadline: float) -> bool:
        """Raise ``bound`` until it exceeds ``enough`` or rises little, and drop columns that are in no plan within
        ``target``. Return whether more rounds are of little use."""
        last, slow = self.bound, 0
        for rounds in range(1, SETTINGS.mixture_most_rounds):
            if self._program.run() != "optimal":
                return True
            value = self._program.solver.Objective().Value() * self._unit
            self._mixed = self._shares()
            fresh = self._price()
            if self.bound > enough or time.monotonic() > deadline:
                return False
            met = value - self.bound < SETTINGS.ranks_mixture_met * self._unit
            if met or rounds % SETTINGS.ranks_mixture_every == 0:
                self._drop(target)
            if met or not fresh or rounds % SETTINGS.ranks_mixture_every == 0:
                fresh += self._separate()
            if not fresh:
                return True
            if met:
                slow = slow + 1 if self.bound < last + SETTINGS.ranks_mixture_slow * self._unit else 0
                last = self.bound
                if slow > SETTINGS.ranks_mixture_patience:
                    return True
        return True

    def _shares(self) -> list[tuple[int, int, float]]:
        values = [(rank, column, variable.solution_value()) for (rank, column), variable in self._chosen.items()]
        return [item for item in values if item[2] > SETTINGS.ranks_mixture_least]

    def _price(self) -> int:
        """Raise the bound by the program's dual prices and by their mean with the best ones; add the ranks' cheapest
        columns. Return how many are new."""
        weights = numpy.maximum([row.dual_value() for row in self._cuts.values()], 0)
        total = weights.sum()
        weights = weights / total if total > SETTINGS.ranks_mixture_least else numpy.eye(1, len(weights))[0]
        prices = numpy.array([row.dual_value() for row in self._counted]) * self._unit
        tried = [(weights, prices)]
        if len(self._best[0]):
            tried.append(centred(self._best, tried[0]))
        fresh = 0
        for guess in tried:
            bound, costs = self._priced(*guess)
            if bound > self.bound:
                self.bound, self._best = bound, guess
            for rank, cost in enumerate(costs):
                fresh += self._add_column(rank, int(self.left[rank][cost.argmin()]))
        return fresh

    def _priced(self, weights: Array, prices: Array) -> tuple[float, list[Array]]:
        """Return the bound under these prices, and the costs of all columns left, by rank."""
        num = len(weights)
        costs = [
            columns.lengths[which] @ (weights @ passes[:num]) - columns.counts[which] @ prices
            for columns, which, passes in zip(self._columns, self.left, self._passes, strict=True)
        ]
        bound = weights @ self._constants[:num] + prices @ self._totals + sum(cost.min() for cost in costs)
        return float(bound), costs

    def _drop(self, target: float) -> None:
        bound, costs = self._priced(*self._best)
        most = target * (1 + ROUNDING) + 1
        self.left = [which[bound - cost.min() + cost <= most] for which, cost in zip(self.left, costs, strict=True)]

    def _separate(self) -> int:
        """Add the critical paths of the mixture and points between it and the fastest one; return how many are new."""
        chunks, num = self._problem.num_chunks, self._problem.num_virtual
        here = [numpy.zeros(2 * chunks + 1) for _ in self.left]
        for rank, column, share in self._mixed:
            here[rank] += share * self._columns[rank].lengths[column]
        points = [here]
        if self._fastest is not None:
            for part in SETTINGS.relaxation_between:
                points.append([part * a + (1 - part) * b for a, b in zip(here, self._fastest[0], strict=True)])
        every: Array = numpy.array(points)
        forward = every[:, :, :chunks].transpose(0, 2, 1).reshape(len(points), num)
        backward = every[:, :, chunks : 2 * chunks].transpose(0, 2, 1).reshape(len(points), num)
        times, paths = self._simulator.critical_paths(forward, backward)
        added = 0
        for index, path in enumerate(paths):
            tails = every[index, :, -1]
            step = float(times[index] + tails.max())
            if self._fastest is None or step < self._fastest[1]:
                self._fastest = points[index], step
            last = int(tails.argmax()) if self._problem.tails else -1
            added += self._add_cut(Cut.of(path, forward[index], backward[index], times[index], last))
        return added

    def start(self) -> Start:
        """Return the cuts with a weight in the bound and the newest columns, for the next program."""
        weights = self._best[0]
        cuts = tuple(c for c, weight in zip(self._cuts, weights, strict=False) if weight > SETTINGS.ranks_mixture_least)
        return Start(cuts, tuple(self._chosen)[-SETTINGS.ranks_mixture_kept * len(self.left) :])

    def divided(self) -> list[Left]:
        """Return two halves of the columns left: fewer, and more layers on the virtual stage whose mean number is
        nearest to a half; all of them if no stage mixes numbers."""
        mean = numpy.zeros((len(self.left), self._problem.num_chunks))
        for rank, column, share in self._mixed:
            mean[rank] += share * self._columns[rank].held[column].sum(axis=1)
        away = numpy.abs(mean - mean.round())
        rank, chunk = (int(place) for place in numpy.unravel_index(int(away.argmax()), away.shape))
        number = self._columns[rank].held[self.left[rank]][:, chunk].sum(axis=1)
        fewer = number <= mean[rank, chunk]
        if fewer.all() or not fewer.any():
            return [self.left]
        return [[*self.left[:rank], self.left[rank][side], *self.left[rank + 1 :]] for side in (fewer, ~fewer)]
