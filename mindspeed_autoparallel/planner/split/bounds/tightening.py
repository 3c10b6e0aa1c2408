"""Where boundaries can lie in placements that stay below a step: the linear relaxation, asked bound by bound.

The least and the most of every boundary, of every stage's and every rank's layers are sought under the cuts known, and
rounded to whole layers; each answer makes the next ones sharper. Paths that the points met exceed are learned on the
way. Often nothing is left, and otherwise little for a search over whole layers (optimality-based bound tightening).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import ceil, floor

import numpy

from mindspeed_autoparallel.planner.split.model.cut_model import ROUNDING, RankCap
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.layer_ranges import LayerRanges, Number
from mindspeed_autoparallel.planner.split.model.layer_row import fits_a_row, is_one_row
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.model.solution import batch_simulator
from mindspeed_autoparallel.planner.split.model.stage_program import StageProgram
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.schedule import BatchSimulator


@dataclass(frozen=True)
class Tightened:
    """What is left of a question."""

    ranges: LayerRanges
    cuts: tuple[Cut, ...]
    """Those known and those learned."""


def can_be_tightened(problem: SplitProblem) -> bool:
    """Return whether every placement is a cut of one row of layers, which is what ranges are about."""
    return is_one_row(problem) and fits_a_row(problem)


def tighten(
    problem: SplitProblem, cuts: Collection[Cut], step: int, deadline: float, caps: Sequence[RankCap] = ()
) -> Tightened | None:
    """Return where layers may be in placements that take at most ``step``; ``None``: there is none.

    ``caps``: what ranks hold in such placements. What the deadline cuts short is valid, only wider.
    """
    return _Tightening(problem, cuts, step, deadline, caps).run()


class _Tightening:
    def __init__(
        self, problem: SplitProblem, cuts: Collection[Cut], step: int, deadline: float, caps: Sequence[RankCap]
    ) -> None:
        self.problem, self.step, self.deadline = problem, step * (1 + ROUNDING), deadline
        self.pool = list(cuts)
        shape = len(self.pool), 2 * problem.num_virtual
        self._rows: Array = numpy.array([[*cut.forwards, *cut.backwards] for cut in self.pool], dtype=float).reshape(
            shape
        )
        self._constants: Array = numpy.array([cut.constant for cut in self.pool], dtype=float)
        self.program = StageProgram(problem, self.step)
        self.program.cap(caps)
        self.ranges = LayerRanges.widest(problem)
        self._simulator: BatchSimulator | None = None
        self.attained = False

    def run(self) -> Tightened | None:
        """Return ranges and cuts."""
        if not self._begin():
            return None
        for _ in range(SETTINGS.tightening_sweeps):
            before = self.ranges
            if not self._sweep():
                return None
            if self.ranges == before or time.monotonic() > self.deadline:
                break
            self.program.follow_order(self.ranges)
        return Tightened(self.ranges, tuple(self.pool))

    def _begin(self) -> bool:
        """Add the cuts known that matter. Return whether anything is left."""
        self.program.keep_to(self.ranges)
        while time.monotonic() < self.deadline:
            status = self.program.any_point()
            if status != "optimal":
                return status != "infeasible"
            if not self._learn(SETTINGS.tightening_many_paths, simulate=False):
                break
        return True

    def _sweep(self) -> bool:
        """Ask for every bound once. Return whether anything is left."""
        met: set[tuple[Number, int]] = set()
        for number, sign in self._questions():
            if time.monotonic() > self.deadline:
                return True
            low, high = self.ranges.of(number)
            if low == high or (number, sign) in met:
                continue
            bound = self._farthest(number, sign, high if sign > 0 else low)
            if bound is None:
                return False
            if bound != (high if sign > 0 else low):
                narrower = self.ranges.narrowed(number, sign, bound)
                if narrower is None:
                    return False
                self.ranges = narrower
                self.program.keep_to(narrower)
            elif self.attained:
                met.update(self.program.at_their_bounds(self.ranges))
        return True

    def _questions(self) -> list[tuple[Number, int]]:
        """Return bounds to ask for: boundaries first, which say what layers stages can have."""
        num = self.problem.num_virtual
        boundaries = sorted(range(1, num), key=lambda v: v & -v, reverse=True)
        found = [(("boundary", v), sign) for v in boundaries for sign in (1, -1)]
        found += [(("rank", rank), 1) for rank in range(self.problem.num_stages)]
        found += [(("stage", v), sign) for sign in (1, -1) for v in range(num)]
        return found + [(("rank", rank), -1) for rank in range(self.problem.num_stages)]

    def _farthest(self, number: Number, sign: int, now: int) -> int | None:
        """Return the least or the most whole value; ``None``: nothing stays below the step."""
        self.attained = False
        for again in reversed(range(SETTINGS.tightening_paths_per_bound + 1)):
            status, value = self.program.farthest(number, sign)
            if status == "infeasible":
                return None
            if status != "optimal":
                return now
            whole = floor(value + ROUNDING) if sign > 0 else ceil(value - ROUNDING)
            if (whole < now) if sign > 0 else (whole > now):
                return whole
            if not again or not self._learn(SETTINGS.tightening_paths_per_bound):
                self.attained = True
                return now
        return now

    def _learn(self, most: int, simulate: bool = True) -> bool:
        """Add paths that the point met exceeds. Return whether there are any."""
        point = self.program.times()
        length = self._rows @ numpy.concatenate(point) + self._constants
        worst = [self.pool[place] for place in numpy.argsort(-length)[:most] if length[place] > self.step]
        fresh = [cut for cut in worst if cut not in self.program.cuts]
        if not fresh:
            cut, step = self._path(point) if simulate else (None, 0.0)
            if cut is None or step <= self.step or cut in self.program.cuts:
                return False
            self.pool.append(cut)
            self._rows = numpy.vstack([self._rows, [*cut.forwards, *cut.backwards]])
            self._constants = numpy.append(self._constants, cut.constant)
            fresh = [cut]
        for cut in fresh:
            self.program.add(cut)
        return True

    def _path(self, point: tuple[Array, Array]) -> tuple[Cut, float]:
        self._simulator = self._simulator or batch_simulator(self.problem)
        (step,), (path,) = self._simulator.critical_paths(point[0][None], point[1][None])
        return Cut.of(path, *point, step), float(step)
