"""Weighted means of cuts: each is a lower bound, and a good mean gives a higher bound than every single cut.

The best mean is the dual of a linear program: the fastest mixture of paths under all cuts. Columns are paths (one
shortest path through the ranges prices them), rows are cuts (the simulator separates them at the mixture's stage
times). Both are added until the bound is high enough or no more exist.
"""

from __future__ import annotations

import time
from typing import Any

import numpy

from mindspeed_autoparallel.planner.split.bounds.paths import Paths
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.linear import LinearProgram
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.ranges import Array
from mindspeed_autoparallel.planner.split.model.solution import step_at
from mindspeed_autoparallel.planner.split.settings import SETTINGS


def best_mean(problem: SplitProblem, paths: Paths, limit: int, deadline: float) -> Array | None:
    """Return the weights of the cuts that give the highest bound found: the cost of their cheapest path.

    Stops when the bound exceeds ``limit``. Adds new cuts to ``paths.cuts``. ``None`` if no weights were found before
    the deadline or a failure of the linear solver.
    """
    return _Mixture(problem, paths, limit).run(deadline)


class _Mixture:
    def __init__(self, problem: SplitProblem, paths: Paths, limit: int) -> None:
        self.problem, self.paths, self.limit = problem, paths, limit
        # Values near 1: the linear solver fails on large numbers.
        self.scale = float(max(1, paths.bound()))
        self.lp = LinearProgram()
        self.step = self.lp.number()
        self.lp.solver.Minimize(self.step)
        self.whole = self.lp.row(low=1, high=1)
        self.rows: list[Any] = []
        self.shares: list[Any] = []
        self.cuts: list[Array] = []
        self.columns: list[Array] = []
        """Forward times, backward times and tails of a path's stages, and 1 to multiply the cuts' constants."""
        for cut in paths.cuts:
            self._add_cut(cut)
        self.costs = [
            numpy.stack([ranges.forward, ranges.backward, ranges.tail], axis=1).astype(float) for ranges in paths.ranges
        ]

    def run(self, deadline: float) -> Array | None:
        best, most = None, -1.0
        single = self.paths.constant + self.paths.to_end[0][0]
        weights: Array = numpy.zeros(len(self.rows))
        weights[int(numpy.argmax(single[: len(self.rows)]))] = 1
        self._add_path(self.paths.cheapest(self._stage_costs(weights))[1])
        for rounds in range(1, SETTINGS.best_mean_most_rounds):
            if time.monotonic() > deadline or self.lp.run() != "optimal":
                break
            step = self.step.solution_value() * self.scale
            shares = numpy.array([share.solution_value() for share in self.shares])
            weights = numpy.maximum([row.dual_value() for row in self.rows], 0)
            if not 0.5 < weights.sum() < 2:
                break
            weights /= weights.sum()
            tried = [weights]
            if best is not None:
                best = numpy.concatenate([best, numpy.zeros(len(weights) - len(best))])
                tried.insert(0, SETTINGS.best_mean_centred * best + (1 - SETTINGS.best_mean_centred) * weights)
            value = most
            for guess in tried:
                value, path = self.paths.cheapest(self._stage_costs(guess))
                value += float(guess @ [cut[-1] for cut in self.cuts])
                if value > most:
                    best, most = guess, value
                self._add_path(path)
            if most > self.limit:
                break
            met = step - value < SETTINGS.best_mean_close * self.scale
            if met or rounds % 5 == 0:
                cut = self._separate(shares, step)
                if cut is None:
                    if met:
                        break
                else:
                    self.paths.cuts[cut] = None
                    self._add_cut(cut)
        return best

    def _stage_costs(self, weights: Array) -> list[Array]:
        mean = weights @ numpy.array(self.cuts)
        num = self.problem.num_stages
        return [cost @ mean[stage : 3 * num : num] for stage, cost in enumerate(self.costs)]

    def _add_cut(self, cut: Cut) -> None:
        tails = [stage == cut.tail_stage for stage in range(self.problem.num_stages)]
        row = numpy.array([*cut.forwards, *cut.backwards, *tails, cut.constant], dtype=float)
        constraint = self.lp.row([(1, self.step)], low=0)
        for share, column in zip(self.shares, self.columns, strict=True):
            constraint.SetCoefficient(share, -float(row @ column) / self.scale)
        self.cuts.append(row)
        self.rows.append(constraint)

    def _add_path(self, path: list[int]) -> None:
        times = numpy.array([cost[arc] for cost, arc in zip(self.costs, path, strict=True)])
        column = numpy.array([*times.T.ravel(), 1.0])
        share = self.lp.number()
        self.whole.SetCoefficient(share, 1)
        for row, value in zip(self.rows, numpy.array(self.cuts) @ column, strict=True):
            row.SetCoefficient(share, -float(value) / self.scale)
        self.columns.append(column)
        self.shares.append(share)

    def _separate(self, shares: Array, step: float) -> Cut | None:
        """Return the critical path of the mixture as a cut, if it is new and exceeds the program's ``step``."""
        problem, num = self.problem, self.problem.num_stages
        mixed = shares @ numpy.array(self.columns[: len(shares)])
        forward, backward, tails = mixed[: 3 * num].reshape(3, num).tolist()
        found = step_at(problem, forward, backward)
        if found.step_time + max(tails) <= step * (1 + 1e-6):
            return None
        last = tails.index(max(tails)) if problem.tails else -1
        cut = Cut.of(found, forward, backward, found.step_time, last)
        return None if cut in self.paths.cuts else cut
