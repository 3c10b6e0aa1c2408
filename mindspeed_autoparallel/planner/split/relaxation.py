"""Cuts from the linear relaxation: cheap rounds that leave little for the integer solver.

A critical path is a linear function of the stages' times, and no plan is faster than any path: that holds for the
paths of fractional plans too.
"""

from __future__ import annotations

import time
from typing import Any

from mindspeed_autoparallel.planner.split.problem import SplitProblem
from mindspeed_autoparallel.planner.split.solution import longest_tail, stage_times, step_of

MOST_ITERATIONS = 5000
"""Of the linear solver in one round."""
Cut = tuple[tuple[int, ...], tuple[int, ...], int, int]
"""Forwards and backwards by virtual stage, the constant, and the stage whose tail follows (-1: none)."""


def cut_of(problem: SplitProblem, placement: object) -> tuple[Cut, float]:
    """The critical path of a placement with the longest tail, and their length."""
    step = step_of(problem, placement)
    forward, backward = stage_times(problem, placement)
    path = sum(n * t for n, t in zip(step.num_forwards, forward, strict=True))
    path += sum(n * t for n, t in zip(step.num_backwards, backward, strict=True))
    stage, tail = longest_tail(problem, placement)
    # What is left is messages: a whole number of ticks, whatever the rounding of fractional times.
    return (step.num_forwards, step.num_backwards, round(step.step_time - path), stage), step.step_time + tail


def tail_rows(problem: SplitProblem, x: Any, stage: int) -> list[tuple[list[tuple[int, Any]], int]]:
    """The stage's tail is at least every row: (coefficient, variable) pairs, and a constant."""
    rows = []
    for tail in problem.tails if stage >= 0 else ():
        terms = [
            (ticks, row[v])
            for ticks, kinds in zip(tail.by_segment, x, strict=True)
            for row in kinds
            for v in range(stage, problem.num_virtual, problem.num_stages)
            if ticks
        ]
        # A stage may hold nothing but layers without a tail: then there is no fixed part.
        surely = all(tail.by_segment) and not problem.allow_empty_stages
        rows.append((terms, tail.fixed if surely else 0))
    return rows or [([], 0)]


def relaxed_cuts(
    problem: SplitProblem, deadline: float, stop_at: float | None = None
) -> tuple[dict[Cut, None], float] | None:
    """Cuts, and a lower bound on the step time; ``None`` when even fractions of layers do not fit.

    ``stop_at``: a bound that is high enough.
    """
    from ortools.linear_solver import pywraplp

    lp = pywraplp.Solver.CreateSolver("GLOP")
    num = problem.num_virtual
    # Times near 1: GLOP loses its way with large numbers.
    unit = max(1.0, sum(s.num_layers * (s.forward + s.backward) for s in problem.segments) / num)
    x: list[list[list[Any]]] = [
        [[lp.NumVar(0, s.num_layers, "") for _ in range(num)] for _ in s.kinds] for s in problem.segments
    ]
    here = [[sum(x[k][q][v] for q in range(len(s.kinds))) for v in range(num)] for k, s in enumerate(problem.segments)]
    for k, segment in enumerate(problem.segments):
        lp.Add(sum(here[k]) == segment.num_layers)
        if segment.beside is not None:
            for v in range(num):
                lp.Add(here[k][v] <= here[segment.beside][v])
        for before in segment.predecessors:
            for v in range(num - 1):
                done = sum(here[before][: v + 1]) * (1 / problem.segments[before].num_layers)
                lp.Add(sum(here[k][: v + 1]) * (1 / segment.num_layers) <= done)
    for v in range(num):
        if not problem.allow_empty_stages:
            lp.Add(sum(row[v] for k, row in enumerate(here) if problem.segments[k].beside is None) >= 1)
    for stage, limit in enumerate(problem.memory_limit):
        room = limit - (problem.fixed_memory[stage] if problem.fixed_memory else 0)
        if room < 0:
            return None
        scale = 1 / max(1, limit)
        lp.Add(
            sum(
                x[k][q][v] * (kind.memory[v] * scale)
                for k, s in enumerate(problem.segments)
                for q, kind in enumerate(s.kinds)
                for v in range(stage, num, problem.num_stages)
            )
            <= room * scale
        )
    step = lp.NumVar(0, lp.infinity(), "")
    lp.Minimize(step)
    terms: list[tuple[Any, Any]] = [
        (
            sum(x[k][q][v] * (s.forward / unit) for k, s in enumerate(problem.segments) for q in range(len(s.kinds))),
            sum(
                x[k][q][v] * ((s.backward + kind.extra_backward) / unit)
                for k, s in enumerate(problem.segments)
                for q, kind in enumerate(s.kinds)
            ),
        )
        for v in range(num)
    ]
    cuts: dict[Cut, None] = {}

    def add(cut: Cut) -> None:
        cuts[cut] = None
        counted = zip(cut[0], cut[1], terms, strict=True)
        path = sum(f * a + b * c for f, b, (a, c) in counted if f or b) + cut[2] / unit
        for tail, fixed in tail_rows(problem, x, cut[3]):
            lp.Add(step >= path + sum(ticks / unit * count for ticks, count in tail) + fixed / unit)

    bound = 0.0
    # Rounds by the size of the schedule, not by time: a rerun finds the same bound.
    events = 2 * problem.num_virtual * problem.num_microbatches
    # GLOP can cycle for minutes on an interleaved problem: the rounds before stay a bound.
    lp.SetSolverSpecificParametersAsString(f"max_number_of_iterations: {MOST_ITERATIONS}")
    for _ in range(max(10, min(300, 400_000 // events))):
        lp.SetTimeLimit(max(1, int(1000 * min(600.0, deadline - time.monotonic()))))
        status = lp.Solve()
        if status == pywraplp.Solver.INFEASIBLE:
            return None
        if status != pywraplp.Solver.OPTIMAL:
            break
        bound = step.solution_value() * unit
        if stop_at is not None and bound * (1 - 1e-6) >= stop_at:
            break
        values = [[[max(0.0, v.solution_value()) for v in row] for row in kinds] for kinds in x]
        cut, length = cut_of(problem, values)
        if cut in cuts or length <= bound * (1 + 1e-7) or time.monotonic() > deadline:
            break
        add(cut)
    return cuts, bound * (1 - 1e-6)
