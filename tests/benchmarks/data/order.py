"""Measure what the order of a replica's microbatches is worth: steps by the exact simulator.

PYTHONPATH=. python tests/benchmarks/data/order.py [steps]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).parent))
from balance import MODELS
from shapes import SHAPES

from mindspeed_autoparallel.data.balance import short_at_the_ends
from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate


def step(stages: int, times: numpy.ndarray) -> float:
    """Return the step of one replica whose stages all take ``times`` forward and twice that backward."""
    forward = [times.tolist()] * stages
    backward = [(2 * times).tolist()] * stages
    program = make_program("1f1b", stages, len(times))
    return simulate(program, StepTimes(forward=forward, backward=backward), rendezvous=True).step_time


def main() -> None:
    """Print one row per shape, number of stages and of microbatches."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(f"{steps} steps each; step over that of the order as drawn; 1F1B, blocking sends, equal stages")
    print("| shape | stages | microbatches | longest first | shortest first | short at the ends | best of 100 drawn |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, draw in SHAPES.items():
        for stages, count in ((4, 8), (4, 32), (8, 32)):
            ratios: dict[str, list[float]] = {"down": [], "up": [], "ends": [], "best": []}
            for seed in range(steps):
                times = MODELS["one phase"].of(draw(count, seed)).sum(axis=1)
                generator = numpy.random.default_rng(seed)
                as_drawn = step(stages, times)
                ratios["down"].append(step(stages, -numpy.sort(-times)) / as_drawn)
                ratios["up"].append(step(stages, numpy.sort(times)) / as_drawn)
                ratios["ends"].append(step(stages, times[short_at_the_ends(times)]) / as_drawn)
                drawn = [step(stages, generator.permutation(times)) for _ in range(100)]
                ratios["best"].append(min(drawn) / as_drawn)
            cells = " | ".join(f"{statistics.mean(ratios[kind]):.3f}" for kind in ("down", "up", "ends", "best"))
            print(f"| {name} | {stages} | {count} | {cells} |")


if __name__ == "__main__":
    main()
