"""How near to its bound the hetero search comes where encoders nearly fill a device.

python tests/benchmarks/hetero/tight_memory.py random 250              random small models, each enumerated too
python tests/benchmarks/hetero/tight_memory.py large 60 56 52 50 48    32 + 80 layers on 32 devices of so many GiB
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "properties" / "planner"))
sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

from hetero_enumeration import enumerated
from synthetic_profile import GIB, synthetic_profile
from test_hetero_search import random_profile

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.hetero.encoders import SUMMED_MODES
from mindspeed_autoparallel.planner.hetero.search import search_hetero
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.spec import Cluster


def small(number: int) -> None:
    """Compare plans and refusals of random models with enumeration."""
    draw, gaps, losses, refused, unproved = random.Random(1), [], [], 0, 0
    for _ in range(number):
        model = (
            draw.randint(120, 400),
            draw.randint(50, 4000),
            draw.choice([None, draw.randint(20, 900)]),
            draw.randint(200, 2000),
            draw.randint(2, 40),
            draw.choice([1.05, 1.5, 2.0]),
            draw.random() < 0.3,
        )
        batch, devices = draw.choice([2, 4]), draw.choice([1, 2, 4])
        profile, cluster = random_profile(*model), Cluster(num_nodes=1, devices_per_node=devices)
        best = enumerated(profile, cluster, batch)
        try:
            plan = search_hetero(profile, cluster, batch, memory_modes=SUMMED_MODES)
        except InfeasiblePlan as error:
            refused, unproved = refused + 1, unproved + ("not proved" in str(error) or best < float("inf"))
            continue
        gaps.append(plan.search.gap_fraction)
        losses.append(plan.step.total_us / best - 1)
    print(
        f"{len(gaps)} plans: largest gap {max(gaps):.1e}, slower than the best of all by at most {max(losses):.1e}; "
        f"{refused} refused, {unproved} of them without a proof"
    )


def large(capacities_gib: list[float]) -> None:
    """Print plan and gap by memory of a device."""
    print("| GiB | plan | fullest device % | gap % | s |\n" + "| --- " * 5 + "|")
    for gib in capacities_gib:
        profile = synthetic_profile()
        profile = replace(profile, device=replace(profile.device, memory_capacity_bytes=int(gib * GIB)))
        started = time.monotonic()
        try:
            plan = search_hetero(
                profile,
                Cluster(num_nodes=4, devices_per_node=8),
                64,
                SearchOptions(time_limit_s=120.0),
                memory_modes=SUMMED_MODES,
            )
            fullest = max(rank.peak_bytes / rank.limit_bytes for rank in plan.memory)
            shown = (
                f"{plan.layout.label().replace('|', '/')} | {100 * fullest:.1f} | {100 * plan.search.gap_fraction:.4f}"
            )
        except InfeasiblePlan as error:
            shown = f"none fits{', not proved' if 'not proved' in str(error) else ''} | | "
        print(f"| {gib:g} | {shown} | {time.monotonic() - started:.0f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "random":
        small(int(sys.argv[2]))
    else:
        large([float(word) for word in sys.argv[2:]])
