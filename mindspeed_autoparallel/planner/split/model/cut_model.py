"""Layer counts under known cuts, as a linear or an integer program, whose optimum is a lower bound for every plan.

Variables are counts by segment, kind and virtual stage. Rows keep the order, memory at every moment that may be a
stage's fullest, and one critical path each. Memory leaves transients out; the optimum stays a lower bound.
"""

from __future__ import annotations

import time
from math import ceil
from typing import Any

from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.linear import LinearProgram, memory_rows, path_row
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.solution import Placement

ROUNDING = 1e-6
"""Share of the step by which a solver's optimum may exceed the true one."""


FEW_SEPARATIONS = "separating/maxroundsroot = 3\nseparating/maxrounds = 1\n"
"""SCIP's limits for rounds of its own cutting planes, which are slow with the dense rows of paths."""
CLOCK = 2
"""SCIP's clock: 1 is processor time, which benchmarks use on a busy machine; 2 is wall time."""


class CutModel:
    """The program, to which cuts are added.

    ``whole``: stages hold whole layers (SCIP); otherwise fractions are allowed (CLP). In both, the number of recomputed
    layers on a stage may be a fraction: that lowers the bound little and makes queries much easier.
    """

    def __init__(self, problem: SplitProblem, *, whole: bool) -> None:
        """Add the variables, and the rows of order and memory."""
        self.problem, self._whole = problem, whole
        self._program = LinearProgram("SCIP" if whole else "CLP")
        self._row = self._program.row
        num = problem.num_virtual
        # Scale times to about 1: solvers fail on large numbers.
        self.unit = max(1.0, sum(s.num_layers * (s.forward + s.backward) for s in problem.segments) / num)
        self.x: list[list[list[Any]]] = [
            [[self._count(s.num_layers, len(s.kinds) == 1) for _ in range(num)] for _ in s.kinds]
            for s in problem.segments
        ]
        self.step: Any = self._program.number()
        self._program.solver.Minimize(self.step)
        self._finished: dict[tuple[int, int], Any] = {}
        self._prefixes: list[list[Any]] = []
        if whole:
            self._add_totals()
            self._add_prefixes()
        self._add_order()
        self._add_memory()

    def _count(self, most: int, is_all: bool = True) -> Any:
        return self._program.number(most, whole=self._whole and is_all)

    def _of(self, k: int, stages: range, factor: float = 1.0) -> list[tuple[float, Any]]:
        """Return the terms of a segment's layers on ``stages``, times ``factor``."""
        return [(factor, row[v]) for row in self.x[k] for v in stages]

    def _add_totals(self) -> None:
        """Add an integer variable for each stage's total of a segment with several kinds."""
        for k, segment in enumerate(self.problem.segments):
            for v in range(self.problem.num_virtual if len(segment.kinds) > 1 else 0):
                self._row([*self._of(k, range(v, v + 1)), (-1.0, self._count(segment.num_layers))], 0.0, 0.0)

    def _add_prefixes(self) -> None:
        """Add an integer variable for each segment's layers before every boundary: branching on them moves boundaries,
        which raises bounds faster than branching on the counts of single stages."""
        num = self.problem.num_virtual
        for k, segment in enumerate(self.problem.segments):
            self._prefixes.append([self._count(segment.num_layers) for _ in range(num - 1)])
            for v in range(num):
                terms = self._of(k, range(v, v + 1))
                if v:
                    terms.append((1.0, self._prefixes[k][v - 1]))
                if v < num - 1:
                    terms.append((-1.0, self._prefixes[k][v]))
                total = 0.0 if v < num - 1 else float(segment.num_layers)
                self._row(terms, total, total)

    def _before(self, k: int, boundary: int) -> list[tuple[float, Any]]:
        """Return the terms of a segment's layers on the virtual stages before a boundary."""
        if self._prefixes:
            return [(1.0, self._prefixes[k][boundary - 1])]
        return self._of(k, range(boundary))

    def _add_order(self) -> None:
        segments, num = self.problem.segments, self.problem.num_virtual
        for k, segment in enumerate(segments):
            self._row(self._of(k, range(num)), segment.num_layers, segment.num_layers)
            if segment.beside is not None:
                for v in range(num):
                    here = range(v, v + 1)
                    self._row(self._of(k, here) + self._of(segment.beside, here, -1.0), high=0)
            for before in segment.predecessors:
                for v in range(num - 1):
                    self._follow(k, before, v + 1)
        for joint in self.problem.joints:
            size, of_before = float(joint.num_layers), segments[joint.before].num_layers
            for boundary in range(1, num):
                ended = [(-size * factor, row) for factor, row in self._before(joint.before, boundary)]
                self._row([*self._before(joint.segment, boundary), *ended], low=size * (1 - of_before))
        if not self.problem.allow_empty_stages:
            solid = [k for k, segment in enumerate(segments) if segment.beside is None]
            for v in range(num):
                self._row([term for k in solid for term in self._of(k, range(v, v + 1))], low=1)

    def _follow(self, k: int, before: int, boundary: int) -> None:
        """Add that the share of segment ``k`` before a boundary is at most that of its predecessor; with whole layers,
        that it has layers there only if its predecessor is complete."""
        of_k, of_before = self.problem.segments[k].num_layers, self.problem.segments[before].num_layers
        if not self._whole:
            stages = range(boundary)
            self._row(self._of(k, stages, 1 / of_k) + self._of(before, stages, -1 / of_before), high=0)
            return
        key = before, boundary
        if key not in self._finished:
            self._finished[key] = self._program.number(1, whole=True)
            self._row([*self._before(before, boundary), (-float(of_before), self._finished[key])], low=0)
        self._row([*self._before(k, boundary), (-float(of_k), self._finished[key])], high=0)

    def _add_memory(self) -> None:
        problem = self.problem
        for stage in range(problem.num_stages):
            scale = 1 / max(1, problem.memory_limit[stage])
            for row in memory_rows(problem, stage):
                terms = [(term.size * scale, self.x[term.segment][term.kind][term.stage]) for term in row]
                self._row(terms, high=problem.memory_limit[stage] * scale)

    def add(self, cut: Cut) -> None:
        """Add that the step takes at least the length of this path."""
        terms = [
            (term.size / self.unit, self.x[term.segment][term.kind][term.stage])
            for term in path_row(self.problem, cut)
            if term.size
        ]
        for tail, fixed in tail_rows(self.problem, self.x, cut.tail_stage):
            after = [(size / self.unit, count) for size, count in tail]
            # A row takes each variable once. Keyed by id: solvers' variables overload ``==`` and cannot be keys.
            sums: dict[int, tuple[float, Any]] = {}
            for weight, count in [*terms, *after]:
                sums[id(count)] = (sums.get(id(count), (0.0, count))[0] - weight, count)
            self._row([(1.0, self.step), *sums.values()], low=(cut.constant + fixed) / self.unit)

    def solve(self, deadline: float, most_nodes: int = 0, below: float | None = None) -> tuple[str, float]:
        """Return ``optimal``, ``feasible``, ``infeasible`` or ``unknown``; and a lower bound in ticks.

        ``below``: upper limit of the step. ``most_nodes``: most nodes of the search for whole layers; 0: no limit.
        """
        seconds = max(0.01, min(3600.0, deadline - time.monotonic()))
        solver = self._program.solver
        solver.SetTimeLimit(int(1000 * seconds))
        if below is not None:
            self.step.SetUb(below / self.unit)
        if self._whole:
            settings = f"timing/clocktype = {CLOCK}\n{FEW_SEPARATIONS}"
            settings += f"limits/nodes = {most_nodes}\n" if most_nodes else ""
            solver.SetSolverSpecificParametersAsString(settings)
        status = self._program.run()
        if status in ("infeasible", "unknown"):
            return status, 0.0
        bound = solver.Objective().BestBound() if self._whole else self.step.solution_value()
        return status, bound * self.unit * (1 - ROUNDING)

    def values(self) -> list[list[list[float]]]:
        """Return the counts of the solution: by segment, kind and virtual stage."""
        return [[[max(0.0, v.solution_value()) for v in row] for row in kinds] for kinds in self.x]


def tail_rows(problem: SplitProblem, x: Any, stage: int) -> list[tuple[list[tuple[int, Any]], int]]:
    """Return lower bounds of the stage's tail, each as (coefficient, variable) pairs and a constant."""
    rows: list[tuple[list[tuple[int, Any]], int]] = []
    for tail in problem.tails_at(stage) if stage >= 0 else ():
        terms = [
            (ticks, row[v])
            for ticks, kinds in zip(tail.by_segment, x, strict=True)
            for row in kinds
            for v in range(stage, problem.num_virtual, problem.num_stages)
            if ticks
        ]
        # The fixed part does not apply to a stage whose layers all have no tail.
        surely = all(tail.by_segment) and not problem.allow_empty_stages
        rows.append((terms, tail.fixed if surely else 0))
    return rows or [([], 0)]


def whole_counts(values: list[list[list[float]]]) -> Placement:
    """Return integer counts for whole layers of which fractions are recomputed; recomputed layers are rounded up."""
    placement: list[tuple[tuple[int, ...], ...]] = []
    for kinds in values:
        columns: list[tuple[int, ...]] = []
        for column in zip(*kinds, strict=True):
            left, counts = round(sum(column)), list[int]()
            for value in column[1:]:
                counts.append(min(left, ceil(value - ROUNDING)))
                left -= counts[-1]
            columns.append((left, *counts))
        placement.append(tuple(zip(*columns, strict=True)))
    return tuple(placement)
