"""The fastest mixture of stages' options under known cuts: column generation, and the bound of its dual prices.

Dual prices give every layer a price at every stage and every cut a weight. Under them each stage chooses its cheapest
option independently, and the sum is a lower bound for every plan. An option that would raise it above a limit is in no
plan within that limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy

from mindspeed_autoparallel.planner.split.bounds.divisions import Choice
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.linear import LinearProgram, centred
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.ranges import NEVER
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.model.stage_options import StageOptions
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.schedule import BatchSimulator


@dataclass(frozen=True)
class Prices:
    """Weights of cuts, the price of a segment's layer at every stage, and the bound they give."""

    weights: Array
    duals: Array
    """Dual values of the rows of counts."""
    bound: float


class Mixture:
    """One linear program over the options of a choice."""

    def __init__(
        self, table: StageOptions, choice: Choice, cuts: dict[Cut, None] | None, simulator: BatchSimulator, unit: float
    ) -> None:
        """Start with the cuts of ``choice``.

        ``cuts``: shared; ``run`` takes cuts from it and adds new ones to it. ``None``: only those of ``choice`` count.
        """
        self.table, self.choice, self.known, self.simulator, self.unit = table, choice, cuts, simulator, unit
        self.problem: SplitProblem = table.problem
        self.lp = LinearProgram()
        self.step: Any = self.lp.number()
        self.lp.solver.Minimize(self.step)
        num = self.problem.num_stages
        self.once = [self.lp.row(low=1, high=1) for _ in range(num)]
        self.of_counts, self.totals = self._rows_of_counts()
        self.counted: list[Any] = []
        for total, ordered in zip(self.totals, self.is_order, strict=True):
            low = None if ordered else float(total)
            self.counted.append(self.lp.row_with_slack(low, float(total), SETTINGS.mixture_missing))
        self.rows: list[Any] = []
        self.cuts: list[Cut] = []
        self.columns: list[tuple[int, int, Any]] = []
        self._present: set[tuple[int, int]] = set()
        for cut in choice.cuts:
            self._add_cut(cut)
        if choice.floor:
            self._add_cut(Cut((1,) * num, (1,) * num, choice.floor))

    def _rows_of_counts(self) -> tuple[Array, Array]:
        """Return rows over counts, ``[row, stage, segment]``, and their right-hand sides.

        The first rows place all layers of each segment. The others have an upper limit only: the share of a segment
        before a boundary minus that of its predecessor, and joints.
        """
        segments, num = self.problem.segments, self.problem.num_stages
        rows, totals = list[Array](), list[float]()
        self.is_order: list[bool] = []
        for k, segment in enumerate(segments):
            row = numpy.zeros((num, len(segments)))
            row[:, k] = 1
            rows.append(row)
            totals.append(float(segment.num_layers))
            self.is_order.append(False)
        for k, segment in enumerate(segments):
            for before in segment.predecessors:
                for boundary in range(1, num):
                    row = numpy.zeros((num, len(segments)))
                    row[:boundary, k] = 1 / segment.num_layers
                    row[:boundary, before] = -1 / segments[before].num_layers
                    rows.append(row)
                    totals.append(0.0)
                    self.is_order.append(True)
        for joint in self.problem.joints:
            for boundary in range(1, num):
                row = numpy.zeros((num, len(segments)))
                row[:boundary, joint.before] = joint.num_layers
                row[:boundary, joint.segment] = -1
                rows.append(row)
                totals.append(float(joint.num_layers * (segments[joint.before].num_layers - 1)))
                self.is_order.append(True)
        return numpy.array(rows), numpy.array(totals)

    def run(self, limit: int, deadline: float) -> tuple[Prices | None, Array]:
        """Return the best prices found, and the fastest mixture's counts, ``[stage, segment]``.

        Stops when the bound exceeds ``limit``. Prices are ``None`` if some stage has no option left that fits, or if
        the linear solver failed.
        """
        best: Prices | None = None
        mixed: Array = numpy.zeros((self.problem.num_stages, len(self.problem.segments)))
        if not self._begin():
            return None, mixed
        for rounds in range(1, SETTINGS.mixture_most_rounds):
            if self.lp.run() != "optimal":
                break
            value = self.lp.solver.Objective().Value() * self.unit
            shares = numpy.array([column.solution_value() for _, _, column in self.columns])
            weights = numpy.maximum([row.dual_value() for row in self.rows], 0)
            duals = numpy.array([row.dual_value() for row in self.counted]) * self.unit
            duals = numpy.where(self.is_order, numpy.minimum(duals, 0), duals)
            mixed = self._mixed(shares)
            total = weights.sum()
            weights = weights / total if total > 1e-6 else numpy.eye(1, len(weights))[0]
            tried = [(weights, duals)]
            if best is not None:
                tried.insert(0, centred((best.weights, best.duals), (weights, duals)))
            fresh, held = 0, list(self.columns)
            for guess in tried:
                bound, chosen, _ = self.priced(*guess)
                if best is None or bound > best.bound:
                    best = Prices(*guess, bound)
                fresh += sum(self._add_column(stage, option) for stage, option in enumerate(chosen))
            assert best is not None  # set in the first round
            if best.bound > limit or time.monotonic() > deadline:
                break
            met = value - best.bound < SETTINGS.mixture_close * self.unit
            if met and self.known is None:
                break
            if (met or not fresh or rounds % 3 == 0) and not self._separate(held, shares, value) and (met or not fresh):
                break
        return best, mixed

    def used(self, prices: Prices) -> None:
        """Store in ``choice`` the cuts and columns from which the searches of its parts start."""
        num = len(prices.weights)
        ones = (1,) * self.problem.num_stages
        self.choice.cuts = [
            cut
            for cut, weight in zip(self.cuts[:num], prices.weights, strict=True)
            if weight > 1e-9 and cut[:2] != (ones, ones)
        ] or self.choice.cuts
        self.choice.columns = [(stage, option) for stage, option, _ in self.columns[-4 * len(self.once) :]]

    def _begin(self) -> bool:
        average = [s.num_layers / self.problem.num_stages for s in self.problem.segments]
        left = [set(options.tolist()) for options in self.choice.options] if self.choice.columns else []
        for stage, option in self.choice.columns:
            if option in left[stage]:
                self._add_column(stage, option)
        begun = {stage for stage, _, _ in self.columns}
        for stage, options in enumerate(self.choice.options):
            if stage not in begun:
                nearest = self.table.near(stage, options, average, SETTINGS.mixture_beginnings)
                if not nearest:
                    self.choice.options[stage] = options[:0]
                    return False
                for option in nearest:
                    self._add_column(stage, option)
        return True

    def _add_cut(self, cut: Cut) -> None:
        row = self.lp.row([(1, self.step)], low=cut.constant / self.unit)
        for stage, option, column in self.columns:
            row.SetCoefficient(column, -self._length(cut, stage, option))
        self.rows.append(row)
        self.cuts.append(cut)

    def _length(self, cut: Cut, stage: int, option: int) -> float:
        table = self.table
        ticks = cut.forwards[stage] * int(table.forward[option]) + cut.backwards[stage] * int(
            table.backward[stage][option]
        )
        return (ticks + (int(table.tail[stage][option]) if cut.tail_stage == stage else 0)) / self.unit

    def _add_column(self, stage: int, option: int) -> bool:
        if (stage, option) in self._present or self.table.backward[stage][option] >= NEVER:
            return False
        self._present.add((stage, option))
        column = self.lp.number()
        self.once[stage].SetCoefficient(column, 1)
        for row, value in zip(self.counted, self.of_counts[:, stage] @ self.table.counts[option], strict=True):
            if value:
                row.SetCoefficient(column, float(value))
        for row, cut in zip(self.rows, self.cuts, strict=True):
            row.SetCoefficient(column, -self._length(cut, stage, option))
        self.columns.append((stage, option, column))
        return True

    def priced(self, weights: Array, duals: Array) -> tuple[float, list[int], list[Array]]:
        """Return the bound under these prices, each stage's cheapest option, and the costs of all options."""
        table, cuts = self.table, self.cuts[: len(weights)]
        forwards = weights @ numpy.array([cut.forwards for cut in cuts])
        backwards = weights @ numpy.array([cut.backwards for cut in cuts])
        bound = float(weights @ numpy.array([cut.constant for cut in cuts]) + duals @ self.totals)
        prices = numpy.tensordot(duals, self.of_counts, axes=1)
        chosen, costs = list[int](), list[Array]()
        for stage, options in enumerate(self.choice.options):
            tails = float(sum(weight for weight, cut in zip(weights, cuts, strict=True) if cut.tail_stage == stage))
            base = forwards[stage] * table.forward[options] - table.counts[options] @ prices[stage]
            if tails:
                base = base + tails * table.tail[stage][options]
            while True:
                cost = base + backwards[stage] * table.backward[stage][options]
                best = int(numpy.argmin(cost))
                if table.is_exact(stage, options[best : best + 1])[0]:
                    break
                near = numpy.flatnonzero(cost <= cost[best] + SETTINGS.mixture_close * self.unit)
                near = near[~table.is_exact(stage, options[near])][: SETTINGS.mixture_settled]
                for place in {best, *near.tolist()}:
                    table.settle(stage, int(options[place]))
            chosen.append(int(options[best]))
            costs.append(cost)
            bound += float(cost[best])
        return bound, chosen, costs

    def drop(self, prices: Prices, limit: int) -> None:
        """Drop options that are in no plan within ``limit``."""
        bound, _, costs = self.priced(prices.weights, prices.duals)
        most = limit * (1 + 1e-9) + 1
        for stage, cost in enumerate(costs):
            options = self.choice.options[stage]
            fits = self.table.backward[stage][options] < NEVER
            self.choice.options[stage] = options[fits & (bound - cost.min() + cost <= most)]

    def _mixed(self, shares: Array) -> Array:
        mixed = numpy.zeros((self.problem.num_stages, len(self.problem.segments)))
        for share, (stage, option, _) in zip(shares, self.columns, strict=True):
            mixed[stage] += share * self.table.counts[option]
        return mixed

    def _separate(self, columns: list[tuple[int, int, Any]], shares: Array, value: float) -> bool:
        """Add cuts that exceed the program's value at its mixture. Return whether any were added."""
        table, num = self.table, self.problem.num_stages
        times: Array = numpy.zeros((3, num))
        forward, backward, tail = times
        for share, (stage, option, _) in zip(shares, columns, strict=True):
            if share > 1e-9:
                forward[stage] += share * table.forward[option]
                backward[stage] += share * table.backward[stage][option]
                tail[stage] += share * table.tail[stage][option]
        if self.known is None:
            return False
        # Cuts of other programs come first: they need no replay.
        known = [cut for cut in self.known if cut not in set(self.cuts)]
        if known:
            length = (
                numpy.array([cut.forwards for cut in known]) @ forward
                + numpy.array([cut.backwards for cut in known]) @ backward
            )
            length += numpy.array(
                [cut.constant + (tail[cut.tail_stage] if cut.tail_stage >= 0 else 0) for cut in known]
            )
            longest: Array = numpy.argsort(-length)[:3]
            above = [known[int(at)] for at in longest if length[at] > value * (1 + SETTINGS.mixture_close)]
            for cut in above:
                self._add_cut(cut)
            if above:
                return True
        times, paths = self.simulator.critical_paths(forward[None], backward[None])
        last = int(tail.argmax()) if self.problem.tails else -1
        if float(times[0]) + tail.max() <= value * (1 + SETTINGS.mixture_close):
            return False
        cut = Cut.of(paths[0], forward, backward, times[0], last)
        if cut in self.known:
            return False
        self.known[cut] = None
        self._add_cut(cut)
        return True
