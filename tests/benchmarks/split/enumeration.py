"""Processor time of enumerating small problems, drawn as in tests/properties/split/test_enumeration.py.

    python tests/benchmarks/split/enumeration.py 60

Prints the worst processor times of problems that were solved and of those given up, and the largest number of placements.
"""

from __future__ import annotations

import contextlib
import random
import runpy
import sys
import time
from pathlib import Path

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split.state import Limits, State
from mindspeed_autoparallel.planner.split.strategies.enumeration import enumerate_all

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
random_problem = runpy.run_path(str(Path(__file__).parents[2] / "properties/split/test_enumeration.py"))[
    "random_problem"
]
SHAPES = [("1f1b", 3, 1), ("1f1b", 4, 1), ("interleaved", 2, 2), ("interleaved", 2, 3)]


def main(wanted: int) -> None:
    """Enumerate problems until ``wanted`` with at least 1,000 placements are solved."""
    drawn = random.Random(1)
    solved, given_up = [], []
    while len(solved) < wanted:
        problem = random_problem(drawn, *drawn.choice(SHAPES), most_layers=12, sizes=(40, 400))
        begin = time.process_time()
        with contextlib.suppress(InfeasiblePlan):
            number = enumerate_all(State(problem=problem, limits=Limits()))
            seconds = time.process_time() - begin
            if not number:
                given_up.append(seconds)
            elif number >= 1_000:
                solved.append((seconds, number))
    print(f"{len(solved)} solved, worst {max(solved)[0]:.2f} s; largest {max(most for _, most in solved)} placements")
    print(f"{len(given_up)} given up, worst {max(given_up, default=0.0):.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]))
