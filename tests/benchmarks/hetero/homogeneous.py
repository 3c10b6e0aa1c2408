"""The homogeneous side of a comparison: gaps of searches of at most 12 layers, drawn at random.

python tests/benchmarks/hetero/homogeneous.py NUMBER [SECONDS]      every layout, and pipelines alone; SECONDS of a search
python tests/benchmarks/hetero/homogeneous.py NUMBER SECONDS hetero encoders with layouts of their own; a generator ends the
                                                                    backbone's pipeline
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from small_profile import block, small_profile

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.hetero.search import search_hetero
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.profiles import Measurement, ModuleCost, Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Module
from mindspeed_autoparallel.units import MIB

TIMES_US = (100.0, 300.0, 1000.0, 4000.0)
NAMES = ("image_encoder", "audio_encoder", "text_decoder", "image_generator")


def draw(chance: random.Random) -> Profile:
    """Return one or two encoders, a decoder, sometimes a generator; TP 1 and 2, memory that is scarce or not."""
    counts = [chance.randint(2, 5), chance.choice([0, 0, 2]), 0, chance.choice([0, 0, 1])]
    counts[2] = chance.randint(8, 12) - sum(counts)
    numbers = {name: count for name, count in zip(NAMES, counts, strict=True) if count > 0}
    encoders = tuple(name for name in numbers if name.endswith("encoder"))
    before = {"text_decoder": encoders, "image_generator": ("text_decoder",)}
    modules = tuple(
        Module(name=name, result_key=name, num_layers=count, predecessors=before.get(name, ()))
        for name, count in numbers.items()
    )
    costs = {name: (chance.choice(TIMES_US), chance.choice([3, 10, 30]), chance.random() < 0.6) for name in numbers}
    profile = small_profile(capacity_mib=chance.choice([200, 250, 350, 500, 800]))
    measurements = tuple(
        Measurement(
            at=measured.at,
            modules={
                name: ModuleCost(
                    layer=block(
                        time_us / (1.5 if measured.at.tensor_size == 2 else 1), saved_mib=mib, recomputable=again
                    )
                )
                for name, (time_us, mib, again) in costs.items()
            },
        )
        for measured in profile.measurements
    )
    return replace(profile, model=replace(profile.model, modules=modules), measurements=measurements)


def pipelines(devices: int) -> list[Layout]:
    """Return layouts with at least two stages, interleaved and not."""
    sizes = [(p, t) for p in (2, 4, 8) for t in (1, 2) if devices % (p * t) == 0]
    return [
        Layout(pipeline_size=p, tensor_size=t, data_size=devices // (p * t), virtual_size=v, schedule=schedule)
        for p, t in sizes
        for v, schedule in ((1, "1f1b"), (2, "interleaved"))
    ]


def main(number: int, seconds: float, own_layouts: bool) -> None:
    modes = Counter[str]()
    gaps, refused, started = [], 0, time.process_time()
    for seed in range(number):
        chance = random.Random(seed)
        profile, devices, batch = draw(chance), chance.choice([4, 8]), chance.choice([8, 16, 32])
        for layouts in (None,) if own_layouts else (None, pipelines(devices)):
            options = SearchOptions(time_limit_s=seconds, with_relaxations=False, layouts=layouts)
            cluster, kind = Cluster(num_nodes=1, devices_per_node=devices), "all" if layouts is None else "pipelines"
            try:
                plan = (search_hetero if own_layouts else search)(profile, cluster, batch, options)
            except InfeasiblePlan as error:
                refused += 1
                print(f"seed {seed}, {kind}: {str(error)[:100]}")
                continue
            gaps.append(plan.search.gap_fraction)
            memory = "" if plan.hetero is None else plan.hetero.memory
            modes[memory] += 1
            if gaps[-1] > 0.01:
                layers = [module.num_layers for module in profile.model.modules]
                capacity = profile.device.memory_capacity_bytes // MIB
                print(
                    f"seed {seed}, {kind}: gap {gaps[-1]:.2%}, {layers} layers, {devices} devices of {capacity} MiB, "
                    f"batch {batch}, {plan.layout.label()} {memory}"
                )
    print(
        f"{len(gaps)} plans, {refused} refused: largest gap {max(gaps):.3%}, {sum(g > 1e-6 for g in gaps)} not proved, "
        f"{sum(g > 0.01 for g in gaps)} above 1 %; {time.process_time() - started:.0f} processor s"
        + "".join(f"; {count} in mode {mode}" for mode, count in sorted(modes.items()) if mode)
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 10.0, sys.argv[3:] == ["hetero"])
