"""Processor time and proof of small problems, drawn by tests/helpers/small_splits.py: at most 100,000 placements.

    python tests/benchmarks/split/enumeration.py 300 [first seed]

Prints the problems that are not proved or take more than half a second, and a summary.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.split import SplitProblem, StoppedEarly, solve
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.planner.split.strategies import enumeration

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from small_splits import random_problem

SHAPES = (
    *(("1f1b", stages, 1) for stages in (1, 2, 3, 4, 5, 6, 8)),
    *(("gpipe", stages, 1) for stages in (2, 4)),
    *(("interleaved", stages, chunks) for stages, chunks in ((2, 2), (2, 2), (2, 3), (2, 4), (3, 2), (4, 2), (3, 3))),
)
MOST_SECONDS, MOST_PLACEMENTS, FEWEST = 0.5, 100_000, 100


def num_placements(problem: SplitProblem) -> int:
    """Return the number of placements of layers on virtual stages; a number too large if there are too many."""
    ideals = enumeration._ideals(problem)
    paths = None if ideals is None else enumeration._paths(problem, ideals, MOST_PLACEMENTS)
    return MOST_PLACEMENTS + 1 if paths is None else len(paths)


def draw(seed: int) -> tuple[SplitProblem, int]:
    """Draw a problem of ``FEWEST`` to ``MOST_PLACEMENTS`` placements."""
    drawn = random.Random(seed)
    before, most = SETTINGS.enumeration_most_ideals, drawn.choice([3, 1000])
    vars(SETTINGS)["enumeration_most_ideals"] = 3_000
    try:
        while True:
            shape, segments, layers = drawn.choice(SHAPES), drawn.randint(1, 6), drawn.choice([3, 6, 12, 30, 100])
            try:
                problem = random_problem(drawn, *shape, most_layers=layers, most_segments=segments, most_rounds=most)
            except ConfigError:
                continue
            if FEWEST <= (number := num_placements(problem)) <= MOST_PLACEMENTS:
                return problem, number
    finally:
        vars(SETTINGS)["enumeration_most_ideals"] = before


def features(problem: SplitProblem, number: int) -> str:
    """Return one line about a problem."""
    kinds = max(len(segment.kinds) for segment in problem.segments)
    events = 2 * problem.num_virtual * problem.num_microbatches
    ideals = enumeration._ideals(problem)
    return (
        f"{problem.schedule} {problem.num_stages}x{problem.num_chunks}, {number} placements, {events} events, {kinds} kinds, "
        f"{'many' if ideals is None else len(ideals)} ideals, {[s.num_layers for s in problem.segments]} layers"
    )


def main(wanted: int, first: int = 0) -> None:
    """Solve ``wanted`` problems."""
    bad, infeasible, seconds = 0, 0, list[float]()
    for seed in range(first, first + wanted):
        problem, number = draw(seed)
        begin = time.process_time()
        try:
            status = solve(problem, time_limit_s=6).status
        except StoppedEarly:
            status = "no plan"
        except InfeasiblePlan:
            status, infeasible = "optimal", infeasible + 1
        seconds.append(time.process_time() - begin)
        if status != "optimal" or seconds[-1] > MOST_SECONDS:
            bad += 1
            print(f"seed {seed}: {status}, {seconds[-1]:.2f} s, {features(problem, number)}", flush=True)
    print(
        f"{wanted - bad} of {wanted} proved within {MOST_SECONDS} s, {infeasible} of them without a plan; "
        f"median {sorted(seconds)[wanted // 2]:.3f} s, worst {max(seconds):.2f} s"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
