"""Layer counts under known cuts as an integer program (CP-SAT), for any order of modules."""

from __future__ import annotations

from math import ceil
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.split.model.cut_model import tail_rows
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.linear import memory_rows, path_row
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.solution import Placement, longest_step, tick_of


class IntegerMaster:
    """The program: layer counts, rows of order and memory, and a row for every known cut."""

    def __init__(self, problem: SplitProblem, bound: int) -> None:
        from ortools.sat.python import cp_model

        self.problem, self.cp = problem, cp_model
        self.model: Any = cp_model.CpModel()
        segments, num = problem.segments, problem.num_virtual
        new = self.model.new_int_var
        self.x = [[[new(0, s.num_layers, "") for _ in range(num)] for _ in s.kinds] for s in segments]
        self.unit, self.effort = tick_of(problem), 0.0
        highest = longest_step(problem) // self.unit + 1
        if highest > 2**56:
            raise ConfigError("the step has too many ticks for 64-bit sums: give times in a coarser unit.")
        self.step = new(min(highest, -(-bound // self.unit)), highest, "")
        self.here = [
            [sum(self.x[k][q][v] for q in range(len(s.kinds))) for v in range(num)] for k, s in enumerate(segments)
        ]
        self._order()
        self._memory()
        self.model.minimize(self.step)

    def _order(self) -> None:
        segments, num = self.problem.segments, self.problem.num_virtual
        here = self.here
        complete: dict[tuple[int, int], Any] = {}
        for k, segment in enumerate(segments):
            self.model.add(sum(here[k]) == segment.num_layers)
            if segment.beside is not None:
                for v in range(num):
                    self.model.add(here[k][v] <= here[segment.beside][v])
            for before in segment.predecessors:
                for v in range(num - 1):
                    if (before, v) not in complete:
                        done = complete[before, v] = self.model.new_bool_var("")
                        self.model.add(sum(here[before][: v + 1]) == segments[before].num_layers).only_enforce_if(done)
                    self.model.add(sum(here[k][: v + 1]) == 0).only_enforce_if(~complete[before, v])
            if segment.continues:
                self._keep_order_of_kinds(k)
        for joint in self.problem.joints:
            for v in range(1, num):
                missing = segments[joint.before].num_layers - sum(here[joint.before][:v])
                self.model.add(sum(here[joint.segment][:v]) >= joint.num_layers * (1 - missing))
        if not self.problem.allow_empty_stages:
            for v in range(num):
                self.model.add(sum(row[v] for k, row in enumerate(here) if segments[k].beside is None) >= 1)

    def _keep_order_of_kinds(self, k: int) -> None:
        """Add that no stage has layers of segment ``k`` with an earlier kind than layers of the segment before it."""
        before, here = self.x[k - 1], self.x[k]
        order = self.problem.segments[k].order
        for v in range(self.problem.num_virtual):
            for place in range(1, len(order)):
                late = self.model.new_bool_var("")
                self.model.add(sum(before[q][v] for q in order[place:]) == 0).only_enforce_if(~late)
                self.model.add(sum(here[q][v] for q in order[:place]) == 0).only_enforce_if(late)

    def _memory(self) -> None:
        problem = self.problem
        for stage in range(problem.num_stages):
            room = problem.memory_limit[stage]
            chunks = range(stage, problem.num_virtual, problem.num_stages)
            transients = [
                (kind.transient, row[v])
                for segment, kinds in zip(problem.segments, self.x, strict=True)
                for kind, row in zip(segment.kinds, kinds, strict=True)
                for v in chunks
                if kind.transient
            ]
            peak: Any = 0
            if transients:
                peak = self.model.new_int_var(0, max(size for size, _ in transients), "")
                for size, count in transients:
                    some = self.model.new_bool_var("")
                    self.model.add(count == 0).only_enforce_if(~some)
                    self.model.add(peak >= size).only_enforce_if(some)
            for row in memory_rows(problem, stage):
                used = sum(term.size * self.x[term.segment][term.kind][term.stage] for term in row)
                self.model.add(used + peak <= room)

    def add(self, cut: Cut) -> None:
        """Add ``step >= path``, in units of the times' greatest common divisor."""
        terms = [
            term.size // self.unit * self.x[term.segment][term.kind][term.stage]
            for term in path_row(self.problem, cut)
            if term.size
        ]
        for tail, fixed in tail_rows(self.problem, self.x, cut.tail_stage):
            ticks = [size // self.unit * count for size, count in tail]
            self.model.add(self.step >= sum(terms) + sum(ticks) + (cut.constant + fixed) // self.unit)

    def forbid(self, placement: Placement) -> None:
        """Exclude plans in which every stage holds the same layers as in ``placement``."""
        differs: list[Any] = []
        for here, kinds in zip(self.here, placement, strict=True):
            for count, value in zip(here, map(sum, zip(*kinds, strict=True)), strict=True):
                less, more = self.model.new_bool_var(""), self.model.new_bool_var("")
                self.model.add(count < value).only_enforce_if(less)
                self.model.add(count > value).only_enforce_if(more)
                differs += [less, more]
        self.model.add_bool_or(differs)

    def solve(
        self, seconds: float, seed: int, best: Placement | None, limit: int | None, effort: float | None
    ) -> tuple[str, int, list[Placement]]:
        """Return the status (optimal, feasible, unknown or infeasible), a bound in ticks, and every plan found."""
        variables = [v for kinds in self.x for row in kinds for v in row]
        if best is not None:
            self.model.clear_hints()
            for variable, value in zip(variables, (v for kinds in best for row in kinds for v in row), strict=True):
                self.model.add_hint(variable, value)
        if limit is not None:
            self.model.add(self.step <= limit // self.unit)
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = seed
        solver.parameters.max_time_in_seconds = max(0.01, seconds)
        if effort is not None:
            solver.parameters.max_deterministic_time = max(0.01, effort - self.effort)
        found: list[Placement] = []
        x = self.x

        class Collect(self.cp.CpSolverSolutionCallback):  # type: ignore[name-defined,misc]  # class of a lazy module
            def on_solution_callback(self) -> None:
                found.append(tuple(tuple(tuple(self.value(v) for v in row) for row in kinds) for kinds in x))

        status = solver.solve(self.model, Collect())
        self.effort += solver.response_proto.deterministic_time
        names = {self.cp.OPTIMAL: "optimal", self.cp.FEASIBLE: "feasible", self.cp.INFEASIBLE: "infeasible"}
        name = names.get(status, "unknown")
        bound = 0 if name == "infeasible" else ceil(solver.best_objective_bound - 1e-6) * self.unit
        return name, bound, found
