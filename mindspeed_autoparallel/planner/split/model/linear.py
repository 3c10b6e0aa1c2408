"""Parts shared by all programs over layer counts: rows of memory and of paths, and a builder of linear programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.settings import SETTINGS


class Term(NamedTuple):
    """The contribution of one layer of a segment to a row, for one kind and one virtual stage."""

    size: int
    segment: int
    kind: int
    stage: int
    """Virtual stage."""


def memory_rows(problem: SplitProblem, stage: int) -> Iterator[list[Term]]:
    """Yield a row of memory, without transients, for every moment at which a stage may be fullest."""
    for moment in problem.moments(stage):
        yield [
            Term(kind.memory[v] + moment[chunk] * kind.saved, k, q, v)
            for k, segment in enumerate(problem.segments)
            for q, kind in enumerate(segment.kinds)
            for chunk, v in enumerate(range(stage, problem.num_virtual, problem.num_stages))
        ]


def path_row(problem: SplitProblem, cut: Cut, stages: Sequence[int] | None = None) -> list[Term]:
    """Return the layers' terms in a path's length, on all virtual stages or on ``stages``; no constant, no tail."""
    return [
        Term(cut.forwards[v] * segment.forward + cut.backwards[v] * (segment.backward + kind.extra_backward), k, q, v)
        for k, segment in enumerate(problem.segments)
        for q, kind in enumerate(segment.kinds)
        for v in (range(problem.num_virtual) if stages is None else stages)
    ]


Duals = tuple[Array, Array]
"""Weights of cuts and prices of counts: dual values of a mixture's program."""


def centred(best: Duals, latest: Duals) -> Duals:
    """Return the mean of both; cuts added after ``best`` have no weight in it."""
    share = SETTINGS.mixture_centred
    weights: Array = numpy.append(best[0], numpy.zeros(len(latest[0]) - len(best[0])))
    return share * weights + (1 - share) * latest[0], share * best[1] + (1 - share) * latest[1]


class LinearProgram:
    """A linear program with non-negative variables, solved by OR-Tools (GLOP, CLP or SCIP), imported on first use."""

    def __init__(self, solver: str = "GLOP") -> None:
        from ortools.linear_solver import pywraplp

        self.solver: Any = pywraplp.Solver.CreateSolver(solver)
        self.endless: float = self.solver.infinity()
        self._names = {
            pywraplp.Solver.OPTIMAL: "optimal",
            pywraplp.Solver.FEASIBLE: "feasible",
            pywraplp.Solver.INFEASIBLE: "infeasible",
        }

    def number(self, most: float | None = None, *, whole: bool = False) -> Any:
        """Return a new variable from 0 to ``most``."""
        most = self.endless if most is None else most
        return self.solver.IntVar(0, most, "") if whole else self.solver.NumVar(0, most, "")

    def row(self, terms: Sequence[tuple[float, Any]] = (), low: float | None = None, high: float | None = None) -> Any:
        """Add a row and return it. Each variable may occur once: a later coefficient replaces an earlier one."""
        row = self.solver.Constraint(-self.endless if low is None else low, self.endless if high is None else high)
        for coefficient, variable in terms:
            row.SetCoefficient(variable, coefficient)
        return row

    def row_with_slack(self, low: float | None, high: float, price: float) -> Any:
        """Add a row that solutions may miss at ``price`` a unit, so that there always is one; return it."""
        row = self.row(low=low, high=high)
        for sign in (-1,) if low is None else (1, -1):
            slack = self.number()
            row.SetCoefficient(slack, sign)
            self.solver.Objective().SetCoefficient(slack, price)
        return row

    def run(self) -> str:
        """Solve; return ``optimal``, ``feasible``, ``infeasible`` or ``unknown``."""
        return self._names.get(self.solver.Solve(), "unknown")
