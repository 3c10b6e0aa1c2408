"""Random stacks of two or three kinds of layers: the tuner's choice of recompute beside trying every way.

    python tests/benchmarks/auto_tuning/mixed_stacks.py --stacks 300 [--splits]

``--splits``: beside every way on every split of the layers, too (pipelines without virtual stages).
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mindspeed_autoparallel.planner.tuner import placements as tuned
from mindspeed_autoparallel.planner.tuner.candidates import Configuration, Dimensions, ProfileVariant, enumerate_space
from mindspeed_autoparallel.profiles import BlockCost, Profile, RecomputeCost, mean_layer
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.spec.recompute import RecomputePolicy

sys.path.insert(0, str(Path(__file__).parents[3] / "tests/helpers"))
from language_profile import language_profile

CLUSTER, BATCH = Cluster(num_nodes=1, devices_per_node=4), 16
PATTERNS = (
    (0, 0, 0, 1, 1, 1, 1, 0),
    (0, 0, 1, 1, 1, 1, 1, 1),
    (0, 1) * 4,
    (0, 1, 2, 0, 1, 2, 0, 1),
    (0, 0, 0, 1, 1, 1, 2, 2),
    (0,) * 7 + (1,),
)


def kind_of_layers(layer: BlockCost, draw: random.Random) -> BlockCost:
    work, size = draw.choice([0.4, 1, 2.5]), draw.choice([0.5, 1, 2])
    plain = layer.recompute["none"]
    saved, forward_us = round(plain.saved_bytes * size), layer.forward_us * work

    def modules(kept: float, extra: float) -> RecomputeCost:
        return RecomputeCost(
            saved_bytes=round(saved * kept),
            extra_backward_us=forward_us * extra,
            backward_peak_bytes=plain.backward_peak_bytes + round(saved * (1 - kept)),
        )

    recompute = {
        "none": replace(plain, saved_bytes=saved),
        "selective:layernorm": modules(draw.choice([0.95, 0.9, 0.8]), draw.choice([0.01, 0.05, 0.3])),
        "selective:mlp": modules(draw.choice([0.4, 0.6, 0.9]), draw.choice([0.02, 0.2, 0.6])),
        "selective:core_attn": modules(draw.choice([0.3, 0.6, 0.9]), draw.choice([0.02, 0.1, 0.4])),
        "full": replace(layer.recompute["full"], extra_backward_us=forward_us, backward_peak_bytes=saved),
    }
    optimizer_bytes = round(layer.dense.optimizer_bytes * work)
    return replace(
        layer,
        forward_us=forward_us,
        backward_us=2 * forward_us,
        recompute=recompute,
        dense=replace(layer.dense, optimizer_bytes=optimizer_bytes),
    )


def stack(seed: int) -> Profile:
    draw = random.Random(seed)
    capacity_mib = draw.choice([7000, 9000, 12000, 16000, 20000, 25000])
    pattern, again = draw.choice(PATTERNS), draw.random()
    profile = language_profile(num_layers=8, capacity_mib=capacity_mib, tensor=(1, 2), batches=(1, 2))

    def mixed(module):  # type: ignore[no-untyped-def]  # ModuleCost
        same = random.Random(again)
        kinds = tuple(kind_of_layers(module.layer, same) for _ in range(max(pattern) + 1))
        return replace(module, layer=mean_layer(kinds, pattern), kinds=kinds, pattern=pattern)

    return replace(
        profile,
        measurements=tuple(
            replace(item, modules={name: mixed(module) for name, module in item.modules.items()})
            for item in profile.measurements
        ),
    )


def every_way(
    configuration: Configuration, dimensions: Dimensions, splits: list[tuple[int, ...]]
) -> Iterator[tuned.SolvedConfiguration]:
    (module,) = configuration.candidate.measurement.modules.values()
    for layers in splits:
        for kind in module.layer.recompute:
            for number in range(1, max(layers) + 1) if kind == "full" else (0,):
                yield tuned.evaluate_placement(configuration, layers, kind, number, dimensions)
        for size in range(2, max(layers) + 1):
            yield tuned.evaluate_placement(
                configuration, layers, str(RecomputePolicy.full(size)), max(layers), dimensions
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stacks", type=int, default=300)
    parser.add_argument("--splits", action="store_true")
    chosen = parser.parse_args()
    dimensions = Dimensions(virtual_sizes=(1,) if chosen.splits else (1, 2))
    gaps, num_layouts, num_wrong = [], 0, 0
    for seed in range(chosen.stacks):
        space = enumerate_space([ProfileVariant(name="", settings={}, profile=stack(seed))], CLUSTER, BATCH, dimensions)
        for configuration in space.configurations:
            if not configuration.layout.distributed_optimizer:
                continue
            size = configuration.layout.pipeline_size
            if chosen.splits and size == 1:
                continue
            splits = list(tuned.even_or_balanced_splits(configuration, dimensions))
            if chosen.splits:
                cuts = itertools.combinations(range(1, 8), size - 1)
                splits = [tuple(b - a for a, b in itertools.pairwise((0, *cut, 8))) for cut in cuts]
            fitting = [way for way in every_way(configuration, dimensions, splits) if way.evaluation.fits]
            found, _ = tuned.solve(configuration, dimensions)
            if found is not None and chosen.splits:
                found = tuned.improved(found, dimensions)
            num_layouts += 1
            num_wrong += (found is None) != (not fitting)
            if found is not None:
                gaps.append(found.step_us / min(way.step_us for way in fitting) - 1)
    missed = [gap for gap in gaps if gap > 1e-9]
    print(
        f"{chosen.stacks} stacks, {num_layouts} layouts, {len(gaps)} fit, {num_wrong} judged wrongly; not the fastest: "
        f"{len(missed)}, mean {sum(missed) / max(1, len(missed)):.2%}, worst {max(missed, default=0):.2%}"
    )


if __name__ == "__main__":
    main()
