"""Bytes per rank of the redistribution on Qwen2.5-VL-7B shapes, by plan, against gather-then-slice; and load balance.

python tests/benchmarks/hetero/volume.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from redistribution_volume import gather_then_slice_bytes, received_bytes, standard_placement

from mindspeed_autoparallel.runtime.hetero.redistribution.placement import Item
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import RedistributionPlan, imbalance, make_plan

HIDDEN, PATCH_FEATURES, HALF, MERGE, PIXELS_PER_PATCH = 3584, 1176, 2, 4, 14
TEXT = 64
SIZES = (252, 448, 672, 1036, 1344)


def items_of(num_dp_replicas: int, per_dp_replica: int, sizes: tuple[int, ...], seed: int) -> list[Item]:
    """``per_dp_replica`` square images per backbone replica, sides drawn from ``sizes`` pixels."""
    draw = random.Random(seed)
    items = []
    for dp_replica in range(num_dp_replicas):
        for sample in range(per_dp_replica):
            patches = (draw.choice(sizes) // PIXELS_PER_PATCH) ** 2
            cost = patches * HIDDEN + patches * patches / 64
            rows = patches // MERGE
            # Text before and after the image, padded as every cut below wants it.
            length = -(-(rows + 2 * TEXT) // 16) * 16
            items.append(Item(sample, patches, rows, cost, (), TEXT, length, dp_replica=dp_replica, microbatch=0))
    return items


def received(plan: RedistributionPlan, world: int) -> tuple[float, float]:
    """MB (inputs and outputs) that the busiest rank receives, and the mean over all ranks."""
    totals = [
        received_bytes(plan.inputs, r, PATCH_FEATURES * HALF) + received_bytes(plan.outputs, r, HIDDEN * HALF)
        for r in range(world)
    ]
    return max(totals) / 1e6, sum(totals) / world / 1e6


def main() -> None:
    print(
        "                                       gather      whole items, MB     sharded merge, MB   less by, on average"
    )
    print("case                                       MB     busiest     mean    busiest     mean     whole   sharded")
    for name, world, tensor, pipeline, per_dp_replica, sizes in (
        ("E DP8 / L TP4-DP2, 1036 px", 8, 4, 1, 16, (1036,)),
        ("E DP8 / L TP2-PP2-DP2, 1036 px", 8, 2, 2, 16, (1036,)),
        ("E DP8 / L TP4-DP2, mixed, 16 per DP", 8, 4, 1, 16, SIZES),
        ("E DP64 / L TP4-PP2-DP8, mixed", 64, 4, 2, 64, SIZES),
    ):
        encoder = standard_placement(world)
        backbone = standard_placement(world, tensor=tensor, pipeline=pipeline)
        dp_replicas = world // (tensor * pipeline)
        items = items_of(dp_replicas, per_dp_replica, sizes, seed=1)
        plans = []
        for sequence_parallel in (False, True):
            plans.append(
                make_plan(
                    items,
                    encoder=encoder,
                    backbone=backbone,
                    ranks=range(world),
                    mode="off",
                    sequence_parallel=sequence_parallel,
                )
            )
        gather = (
            gather_then_slice_bytes(
                items,
                plans[0].owners,
                encoder=encoder,
                backbone=backbone,
                input_row_bytes=PATCH_FEATURES * HALF,
                output_row_bytes=HIDDEN * HALF,
            )
            / 1e6
        )
        (whole_max, whole), (shard_max, shard) = (received(plan, world) for plan in plans)
        print(
            f"{name:37s} {gather:7.0f} {whole_max:11.0f} {whole:8.0f} {shard_max:10.0f} {shard:8.0f}"
            f" {gather / whole:9.1f} {gather / shard:9.1f}"
        )
    print()
    print("encoder load max/mean, 16 samples per backbone replica, mixed sizes, mean and worst of 100 draws")
    for mode in ("off", "local", "global"):
        encoder, backbone = standard_placement(8), standard_placement(8, tensor=4)
        found = []
        for seed in range(100):
            items = items_of(2, 16, SIZES, seed)
            ranks_sets = [range(8)] if mode == "global" else [range(4), range(4, 8)]
            loads, owners = [], []
            for ranks in ranks_sets:
                mine = [i for i in items if mode == "global" or i.dp_replica == backbone[ranks[0]].data]
                plan = make_plan(mine, encoder=encoder, backbone=backbone, ranks=ranks, mode=mode)
                loads += [item.cost for item in mine]
                owners += list(plan.owners)
            found.append(imbalance(loads, owners, 8))
        print(f"  {mode:7s} {sum(found) / len(found):.3f} {max(found):.3f}")


main()
