"""Cuts from the linear relaxation: cheap rounds before the search over whole layers.

The length of a path is a linear function of the stages' times and a lower bound for every plan; that holds for the
critical paths of fractional plans too. Each round adds the critical paths at the program's optimum and at points
between it and the fastest fractional plan found, where cuts are deeper.
"""

from __future__ import annotations

import time

import numpy

from mindspeed_autoparallel.planner.split.bounds.whole_ranks import rank_cuts
from mindspeed_autoparallel.planner.split.model.cut_model import CutModel
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.model.solution import (
    Counts,
    batch_simulator,
    longest_tail,
    stage_times,
    step_of,
)
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.schedule import BatchSimulator


def cut_of(problem: SplitProblem, placement: Counts) -> tuple[Cut, float]:
    """Return the critical path of a placement, with the longest tail, as a cut; and the step time."""
    step = step_of(problem, placement)
    forward, backward = stage_times(problem, placement)
    stage, tail = longest_tail(problem, placement)
    return Cut.of(step, forward, backward, step.step_time, stage), step.step_time + tail


def relaxed_cuts(
    problem: SplitProblem,
    deadline: float,
    stop_at: float | None = None,
    known: tuple[Cut, ...] = (),
    most_rounds: int = SETTINGS.relaxation_most_rounds,
) -> tuple[dict[Cut, None], float] | None:
    """Return cuts, and a lower bound of the step time in ticks; ``None`` if even fractions of layers do not fit.

    ``stop_at``: a bound that is high enough. ``known``: cuts to start with.
    """
    if min(problem.memory_limit) < 0:
        return None
    model = CutModel(problem, whole=False)
    simulator: BatchSimulator | None = None
    cuts: dict[Cut, None] = {}

    def add(cut: Cut) -> None:
        cuts[cut] = None
        model.add(cut)

    for cut in (*rank_cuts(problem), *known):
        add(cut)
    best: tuple[Array, float] | None = None
    bound = 0.0
    events = 2 * problem.num_virtual * problem.num_microbatches * (1 + len(SETTINGS.relaxation_between))
    for left in reversed(range(min(most_rounds, max(10, SETTINGS.relaxation_most_events // events)))):
        status, found = model.solve(deadline)
        if status == "infeasible":
            return None
        if status != "optimal":
            break
        bound = found
        if not left or (stop_at is not None and bound >= stop_at):
            break
        # Sorting a schedule's events takes longer than the first optimum, which may suffice.
        simulator = simulator or batch_simulator(problem)
        values = model.values()
        here = numpy.array([(*row,) for kinds in values for row in kinds])
        points = [
            here,
            *(
                [share * here + (1 - share) * best[0] for share in SETTINGS.relaxation_between]
                if best is not None
                else []
            ),
        ]
        paths = _paths_at(problem, simulator, points)
        fastest = min(range(len(points)), key=lambda index: paths[index][1])
        if best is None or paths[fastest][1] < best[1]:
            best = points[fastest], paths[fastest][1]
        fresh = [cut for cut, _ in paths if cut not in cuts]
        if not fresh or best[1] <= bound * (1 + SETTINGS.relaxation_close) or time.monotonic() > deadline:
            break
        for cut in dict.fromkeys(fresh):
            add(cut)
    return cuts, bound


def _paths_at(problem: SplitProblem, simulator: BatchSimulator, points: list[Array]) -> list[tuple[Cut, float]]:
    """Return cuts and step times of fractional placements, whose rows are segment by segment, kind by kind."""
    forward = numpy.array([s.forward for s in problem.segments for _ in s.kinds])
    backward = numpy.array([s.backward + kind.extra_backward for s in problem.segments for kind in s.kinds])
    passes = numpy.array([forward @ point for point in points]), numpy.array([backward @ point for point in points])
    times, paths = simulator.critical_paths(*passes)
    found: list[tuple[Cut, float]] = []
    for index, (point, path) in enumerate(zip(points, paths, strict=True)):
        stage, tail = longest_tail(problem, _nested(problem, point)) if problem.tails else (-1, 0.0)
        cut = Cut.of(path, passes[0][index], passes[1][index], times[index], stage)
        found.append((cut, float(times[index]) + tail))
    return found


def _nested(problem: SplitProblem, point: Array) -> list[list[list[float]]]:
    rows = iter(point.tolist())
    return [[next(rows) for _ in segment.kinds] for segment in problem.segments]
