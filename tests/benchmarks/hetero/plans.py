"""What hetero parallel gives, predicted by the planner and measured on the emulated device.

python tests/benchmarks/hetero/plans.py            virtual clock
python tests/benchmarks/hetero/plans.py --sleep    real sleeps on plain gloo; wants a quiet machine
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests/helpers"))

from emulated_device.hetero_plans import (
    LOADS,
    PP4,
    TP2_PP2,
    Forced,
    forced,
    forced_data_parallel,
    hetero_plan,
    measured_us,
    ways,
)
from emulated_device.launching import run_hetero

SLOWER = 8
"""All times when sleeping: stages of some 130 ms, so that the host's own milliseconds are small beside them."""


def main(sleeping: bool) -> None:
    scale = SLOWER if sleeping else 1
    chosen = [(load, way) for load in LOADS for way in ways(load, scale)]
    measured = measured_us(chosen, sleeping=sleeping, scale=scale)
    worst_step = worst_gain = 0.0
    for load in LOADS:
        rows = [(way, step_us) for (one, way), step_us in zip(chosen, measured, strict=True) if one is load]
        best, best_us = rows[0]
        print(
            f"\n{load.name}\n\n| way | plan | predicted ms | device ms | error % | slower than ViT DP4: predicted "
            "| measured |\n" + "| --- " * 7 + "|"
        )
        for way, step_us in rows:
            error = (way.predicted_us / step_us - 1) * 100
            gains = way.predicted_us / best.predicted_us, step_us / best_us
            worst_step, worst_gain = max(worst_step, abs(error)), max(worst_gain, abs(gains[0] / gains[1] - 1) * 100)
            print(
                f"| {way.name} | {way.plan.layout.label().replace('|', '/')} | {way.predicted_us / 1e3:.3f} | "
                f"{step_us / 1e3:.3f} | {error:+.4f} | {gains[0]:.4f} | {gains[1]:.4f} |"
            )
    print(f"\nworst error of a step {worst_step:.4f} %, of a speed-up {worst_gain:.4f} %")
    if sleeping:
        return
    choices = [
        choice
        for load in LOADS
        for choice in forced(load, [hetero_plan(load, 1, layouts=[layout]) for layout in (TP2_PP2, PP4)])
    ]
    _compare("forced choices (odd scales, both modes, slow links)", choices)
    _compare("with data-parallel backbones", [choice for load in LOADS for choice in forced_data_parallel(load)])


def _compare(what: str, choices: list[Forced]) -> None:
    found = run_hetero([choice.case() for choice in choices], timeout_s=580)
    errors = [abs(c.predicted_us() * 1000 / step_ns - 1) * 100 for c, step_ns in zip(choices, found, strict=True)]
    print(f"{len(choices)} {what}: worst error {max(errors):.4f} %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleep", action="store_true", help="sleep in real time")
    main(parser.parse_args().sleep)
