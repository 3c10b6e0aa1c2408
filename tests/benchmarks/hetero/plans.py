"""What hetero parallel gives, predicted by the planner and measured on the emulated device.

python tests/benchmarks/hetero/plans.py            virtual clock
python tests/benchmarks/hetero/plans.py --sleep    real sleeps on plain gloo; wants a quiet machine
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests/helpers"))

from emulated_device.hetero_forced import forced, forced_data_parallel, forced_stages, forced_window
from emulated_device.hetero_plans import (
    LOADS,
    MORE_LOADS,
    PP4,
    TP2_PP2,
    Load,
    Variant,
    best_of_both,
    hetero_plan,
    measured_us,
    ways,
)
from emulated_device.launching import run_hetero

SLOWER = 8
"""All times when sleeping: stages of some 130 ms, so that the host's own milliseconds are small beside them."""


def main(sleeping: bool) -> None:
    scale = SLOWER if sleeping else 1
    shapes = () if sleeping else (*LOADS, *MORE_LOADS)
    chosen = [(load, way) for load in LOADS for way in ways(load, scale)]
    best = [(load, way) for load in shapes for way in best_of_both(load)]
    measured = measured_us([*chosen, *best], sleeping=sleeping, scale=scale)
    worst_step = worst_gain = 0.0
    for load in LOADS:
        rows = [(way, step_us) for (one, way), step_us in zip(chosen, measured, strict=False) if one is load]
        first, first_us = rows[0]
        print(
            f"\n{load.name}\n\n| way | plan | predicted ms | device ms | error % | slower than ViT DP4: predicted "
            "| measured |\n" + "| --- " * 7 + "|"
        )
        for way, step_us in rows:
            error = (way.predicted_us / step_us - 1) * 100
            gains = way.predicted_us / first.predicted_us, step_us / first_us
            worst_step, worst_gain = max(worst_step, abs(error)), max(worst_gain, abs(gains[0] / gains[1] - 1) * 100)
            print(
                f"| {way.name} | {_label(way)} | {way.predicted_us / 1e3:.3f} | "
                f"{step_us / 1e3:.3f} | {error:+.4f} | {gains[0]:.4f} | {gains[1]:.4f} |"
            )
    print(f"\nworst error of a step {worst_step:.4f} %, of a speed-up {worst_gain:.4f} %")
    if not sleeping:
        _speed_ups(best, measured[len(chosen) :])
        _choices()


def _choices() -> None:
    """Choices that no search would make, and some of them with every transfer waited for: one launch."""
    plain = [
        choice
        for load in LOADS
        for choice in forced(load, [hetero_plan(load, 1, layouts=[layout]) for layout in (TP2_PP2, PP4)])
    ]
    kinds = {
        "forced choices (odd scales, both modes, slow links)": plain,
        "with data-parallel backbones": [choice for load in LOADS for choice in forced_data_parallel(load)],
        "with encoders in stages of their own": [choice for load in LOADS for choice in forced_stages(load)],
        "in memory mode window": [choice for load in LOADS for choice in forced_window(load)],
    }
    waited = [replace(choice, sequential=True) for choice in plain]
    every = [choice for choices in (*kinds.values(), waited) for choice in choices]
    steps_ns = run_hetero([choice.case() for choice in every], timeout_s=580)
    hidden_ns, first = steps_ns[: len(plain)], 0
    print()
    for what, choices in kinds.items():
        found = steps_ns[first : first + len(choices)]
        errors = [abs(c.predicted_us() * 1000 / step_ns - 1) * 100 for c, step_ns in zip(choices, found, strict=True)]
        print(f"{len(choices)} {what}: worst error {max(errors):.4f} %")
        first += len(choices)
    print("\n| hidden transfers: choice | slower links | waiting ms | hidden ms | gain % |\n" + "| --- " * 5 + "|")
    for choice, wait_ns, hide_ns in zip(plain, steps_ns[first:], hidden_ns, strict=True):
        layout = choice.plan.layout
        print(
            f"| {choice.load.name}, PP{layout.pipeline_size} TP{layout.tensor_size}, encoder {choice.sizes.label()}, "
            f"{choice.memory} | {choice.slower_link} | {wait_ns / 1e6:.3f} | {hide_ns / 1e6:.3f} | "
            f"{(wait_ns / hide_ns - 1) * 100:+.2f} |"
        )


def _speed_ups(chosen: list[tuple[Load, Variant]], steps_us: list[float]) -> None:
    """The best hetero and the best homogeneous plan of four shapes, both on the device."""
    print(
        "\n| shape | best hetero | best homogeneous | predicted ms | device ms | speed-up predicted | on the device |\n"
        + "| --- " * 7
        + "|"
    )
    for place in range(0, len(chosen), 2):
        (load, hetero), (_, other) = chosen[place : place + 2]
        ours, theirs = steps_us[place : place + 2]
        print(
            f"| {load.name} | {_label(hetero)} | {_label(other)} | {hetero.predicted_us / 1e3:.3f}, "
            f"{other.predicted_us / 1e3:.3f} | {ours / 1e3:.3f}, {theirs / 1e3:.3f} | "
            f"{other.predicted_us / hetero.predicted_us:.4f} | {theirs / ours:.4f} |"
        )


def _label(way: Variant) -> str:
    mode = f", {way.plan.hetero.memory}" if way.plan.hetero is not None else ""
    return way.plan.layout.label().replace("|", "/") + mode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleep", action="store_true", help="sleep in real time")
    main(parser.parse_args().sleep)
