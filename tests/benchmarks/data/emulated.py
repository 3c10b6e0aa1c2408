"""Compare drawn steps with Megatron's schedule on the emulated device, on three shapes of data.

PYTHONPATH=. python tests/benchmarks/data/emulated.py [steps]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
from emulated_device.launching import run_on_emulated_device
from emulated_device.samples import distribution_of, drawn_steps
from shapes import SHAPES


def main() -> None:
    """Print one row per shape: mean, P95 and the worst single step."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    print(f"PP4 DP2, 8 microbatches a replica, {number} drawn steps")
    print("| data | mean ms, predicted | device | error | P95 ms, predicted | device | error | worst step |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    steps = {name: drawn_steps(distribution_of(draw(20_000, 0)), number) for name, draw in SHAPES.items()}
    cases = [case for rows in steps.values() for step in rows for case in step.cases]
    found = iter(run_on_emulated_device(cases, timeout_s=580))
    for name, rows in steps.items():
        predicted = numpy.array([step.predicted_us for step in rows]) / 1e3
        device = numpy.array([max(next(found).step_ns for _ in step.cases) for step in rows]) / 1e6
        means, tails = (
            (predicted.mean(), device.mean()),
            (numpy.quantile(predicted, 0.95), numpy.quantile(device, 0.95)),
        )
        worst = numpy.abs(predicted / device - 1).max()
        cells = [f"{a:.3f} | {b:.3f} | {100 * (a / b - 1):+.3f} %" for a, b in (means, tails)]
        print(f"| {name} | {cells[0]} | {cells[1]} | {100 * worst:.3f} % |")


if __name__ == "__main__":
    main()
