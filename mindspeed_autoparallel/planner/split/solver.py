"""Critical-path cuts: an integer master that knows a few paths, and the simulator that finds the path it forgot.

The master's bound never exceeds the optimum (every cut is a path of every plan); when it equals the simulated time of
the best plan seen, that plan is proved optimal. See docs/decisions/0019-paths-of-ranges.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.split.baselines import Baseline, baselines
from mindspeed_autoparallel.planner.split.chain_solver import solve_chain
from mindspeed_autoparallel.planner.split.problem import SplitProblem
from mindspeed_autoparallel.planner.split.ranges import is_chain
from mindspeed_autoparallel.planner.split.relaxation import Cut, cut_of, relaxed_cuts, tail_rows
from mindspeed_autoparallel.planner.split.solution import (
    NoneBelow,
    Placement,
    SplitSolution,
    StoppedEarly,
    longest_step,
    stage_memory,
    tick_of,
)
from mindspeed_autoparallel.schedule import make_program

LABELS_PER_EFFORT = 100_000


def solve(
    problem: SplitProblem,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    num_workers: int = 1,
    below: int | None = None,
    effort: float | None = None,
    excluded: Sequence[Placement] = (),
) -> SplitSolution:
    """The fastest placement that fits, with a bound. Raises ``InfeasiblePlan`` with the smallest memory that fits.

    ``below``: plans that take as long are of no interest; ``NoneBelow`` is raised when all do, or when none fits.
    ``excluded``: plans whose layers are not to be used again (beyond chains).
    ``effort``: limit that does not depend on the machine: of the integer solver's own clock (about a second each), or
    of the labels of a search.
    """
    started = time.monotonic()
    deadline = started + time_limit_s
    make_program(problem.schedule, problem.num_stages, problem.num_microbatches, problem.num_chunks)
    if is_chain(problem) and not excluded:
        most_effort = inf if effort is None else effort * LABELS_PER_EFFORT
        return _solved_as_chain(problem, started, deadline, time_limit_s, below, most_effort)
    relaxed = relaxed_cuts(problem, started + time_limit_s / 2, stop_at=below)
    if relaxed is None:
        raise _infeasible(problem)
    cuts, bound = relaxed
    if below is not None and bound >= below:
        raise NoneBelow(f"no plan takes less than {below}.")
    master = _Master(problem, ceil(bound))
    for cut in cuts:
        master.add(cut)
    for placement in excluded:
        master.forbid(placement)
    simple = _best_baseline(problem) if below is None and not excluded else None
    best, best_time = (simple.placement, simple.step_time) if simple else (None, -1)
    lower, rounds = ceil(bound), 0
    while best is None or lower < best_time:
        left = deadline - time.monotonic()
        if left <= 0 or (effort is not None and master.effort >= effort):
            break
        rounds += 1
        limit = best_time if best is not None else None if below is None else below - 1
        status, solved_bound, placements = master.solve(left, seed, num_workers, best, limit, effort)
        if status == "infeasible":
            if best is None:
                raise _infeasible(problem) if below is None else NoneBelow(f"no plan takes less than {below}.")
            lower = best_time
            break
        lower = max(lower, min(solved_bound, best_time) if best else solved_bound)
        fresh = 0
        for placement in placements:
            cut, length = cut_of(problem, placement)
            if (best is None or length < best_time) and (below is None or length < below):
                best, best_time = placement, int(length)
            if cut not in cuts:
                cuts[cut] = None
                master.add(cut)
                fresh += 1
        if not fresh and status != "optimal":
            break
    if best is None:
        raise _nothing_found(time_limit_s, lower)
    lower = min(lower, best_time)
    return SplitSolution(
        status="optimal" if lower >= best_time else "feasible",
        placement=best,
        step_time=best_time,
        lower_bound=lower,
        stage_memory=stage_memory(problem, best),
        rounds=rounds,
        solve_seconds=time.monotonic() - started,
    )


def fits_within(problem: SplitProblem, extra: int, time_limit_s: float) -> bool:
    """Whether any plan fits when every stage may hold ``extra`` more. Raises ``StoppedEarly``."""
    master = _Master(replace(problem, memory_limit=tuple(limit + extra for limit in problem.memory_limit)), 0)
    master.model.clear_objective()
    status, _, placements = master.solve(time_limit_s, 0, 1, None, None, None)
    if status == "unknown":
        raise _nothing_found(time_limit_s, 0)
    return bool(placements)


def _solved_as_chain(
    problem: SplitProblem, started: float, deadline: float, time_limit_s: float, below: int | None, most_effort: float
) -> SplitSolution:
    simple = _best_baseline(problem) if below is None else None
    found = solve_chain(problem, simple.placement if simple else None, deadline, below, most_effort)
    if found.placement is None:
        if below is not None and found.complete:
            raise NoneBelow(f"no plan takes less than {below}.")
        raise _infeasible(problem) if found.complete else _nothing_found(time_limit_s, found.lower_bound)
    return SplitSolution(
        status="optimal" if found.lower_bound >= found.step_time else "feasible",
        placement=found.placement,
        step_time=found.step_time,
        lower_bound=found.lower_bound,
        stage_memory=stage_memory(problem, found.placement),
        rounds=found.rounds,
        solve_seconds=time.monotonic() - started,
    )


def _best_baseline(problem: SplitProblem) -> Baseline | None:
    """The faster of the simple splits that are plans."""
    plans = [item for item in baselines(problem) if item.fits and _is_plan(problem, item.placement)]
    return min(plans, key=lambda item: item.step_time, default=None)


def _is_plan(problem: SplitProblem, placement: Placement) -> bool:
    """Whether a baseline keeps the order, its companions' places, and leaves no stage empty."""
    segments, num = problem.segments, problem.num_virtual
    here = [[sum(row[v] for row in kinds) for v in range(num)] for kinds in placement]
    for k, segment in enumerate(segments):
        first = next(v for v in range(num) if here[k][v])
        for before in segment.predecessors:
            if max(v for v in range(num) if here[before][v]) > first:
                return False
        if segment.beside is not None and any(here[k][v] > here[segment.beside][v] for v in range(num)):
            return False
        if segment.continues and any(
            sum(placement[k - 1][q][v] for q in segment.order[place:])
            and sum(placement[k][q][v] for q in segment.order[:place])
            for place in range(1, len(segment.kinds))
            for v in range(num)
        ):
            return False
    counted = [row for row, s in zip(here, segments, strict=True) if s.beside is None]
    return problem.allow_empty_stages or all(any(row[v] for row in counted) for v in range(num))


def _nothing_found(time_limit_s: float, lower_bound: int) -> StoppedEarly:
    error = StoppedEarly(
        f"no plan was found within the time limit of {time_limit_s:g} s, and none was proved impossible. Raise it."
    )
    error.lower_bound = lower_bound
    return error


class _Master:
    """Layer counts, order and memory rows, and one row per known path."""

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
            raise ConfigError("the step is too long for the tick chosen: use coarser times.")
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
        if not self.problem.allow_empty_stages:
            for v in range(num):
                self.model.add(sum(row[v] for k, row in enumerate(here) if segments[k].beside is None) >= 1)

    def _keep_order_of_kinds(self, k: int) -> None:
        """Where the segment before has layers that come late in the order of kinds, none here comes earlier."""
        before, here = self.x[k - 1], self.x[k]
        order = self.problem.segments[k].order
        for v in range(self.problem.num_virtual):
            for place in range(1, len(order)):
                late = self.model.new_bool_var("")
                self.model.add(sum(before[q][v] for q in order[place:]) == 0).only_enforce_if(~late)
                self.model.add(sum(here[q][v] for q in order[:place]) == 0).only_enforce_if(late)

    def _memory(self) -> None:
        problem = self.problem
        for stage, limit in enumerate(problem.memory_limit):
            room = limit - (problem.fixed_memory[stage] if problem.fixed_memory else 0)
            chunks = range(stage, problem.num_virtual, problem.num_stages)
            used, transients = [], []
            for segment, kinds in zip(problem.segments, self.x, strict=True):
                for kind, row in zip(segment.kinds, kinds, strict=True):
                    used += [kind.memory[v] * row[v] for v in chunks if kind.memory[v]]
                    if kind.transient:
                        transients += [(kind.transient, row[v]) for v in chunks]
            peak: Any = 0
            if transients:
                peak = self.model.new_int_var(0, max(size for size, _ in transients), "")
                for size, count in transients:
                    some = self.model.new_bool_var("")
                    self.model.add(count == 0).only_enforce_if(~some)
                    self.model.add(peak >= size).only_enforce_if(some)
            self.model.add(sum(used) + peak <= room)

    def add(self, cut: Cut) -> None:
        """``step >= path``, in units of the times' greatest common divisor."""
        terms = []
        for segment, kinds in zip(self.problem.segments, self.x, strict=True):
            for kind, row in zip(segment.kinds, kinds, strict=True):
                for f, b, count in zip(cut[0], cut[1], row, strict=True):
                    weight = f * segment.forward + b * (segment.backward + kind.extra_backward)
                    if weight:
                        terms.append(weight // self.unit * count)
        for tail, fixed in tail_rows(self.problem, self.x, cut[3]):
            ticks = [size // self.unit * count for size, count in tail]
            self.model.add(self.step >= sum(terms) + sum(ticks) + (cut[2] + fixed) // self.unit)

    def forbid(self, placement: Placement) -> None:
        """At least one stage holds another number of some segment's layers."""
        differs = []
        for here, kinds in zip(self.here, placement, strict=True):
            for count, value in zip(here, map(sum, zip(*kinds, strict=True)), strict=True):
                less, more = self.model.new_bool_var(""), self.model.new_bool_var("")
                self.model.add(count < value).only_enforce_if(less)
                self.model.add(count > value).only_enforce_if(more)
                differs += [less, more]
        self.model.add_bool_or(differs)

    def solve(
        self,
        seconds: float,
        seed: int,
        num_workers: int,
        best: Placement | None,
        limit: int | None,
        effort: float | None,
    ) -> tuple[str, int, list[Placement]]:
        """(optimal, feasible, unknown or infeasible; bound in ticks; every plan met on the way)."""
        variables = [v for kinds in self.x for row in kinds for v in row]
        if best is not None:
            self.model.clear_hints()
            for variable, value in zip(variables, (v for kinds in best for row in kinds for v in row), strict=True):
                self.model.add_hint(variable, value)
        if limit is not None:
            self.model.add(self.step <= limit // self.unit)
        solver = self.cp.CpSolver()
        solver.parameters.num_workers = num_workers
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


def _infeasible(problem: SplitProblem) -> InfeasiblePlan:
    """Which stage is tightest, by the plan that overruns its limits least."""
    tightest, over = 0, None
    for baseline in baselines(problem):
        used = stage_memory(problem, baseline.placement)
        excess = [size - limit for size, limit in zip(used, problem.memory_limit, strict=True)]
        if over is None or max(excess) < over:
            over = max(excess)
            tightest = excess.index(over)
    low = problem.memory_limit[tightest]
    error = InfeasiblePlan(
        f"no plan fits. In the best simple split stage {tightest} is tightest: {low + max(0, over or 0)} where "
        f"{low} is allowed, with as much recomputation as helps. Raise the memory limit or the pipeline size."
    )
    error.tightest_stage, error.excess = tightest, max(0, over or 0)  # type: ignore[attr-defined]  # read by the command
    return error
