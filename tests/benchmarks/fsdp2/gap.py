"""How far a search of 1,024 devices and 94 layers with experts is proved in 10 s, by the memory that there is.

python tests/benchmarks/fsdp2/gap.py [SECONDS [SEED ...]]

A random profile with 675 choices of sizes; memory stands between the peak of the shipped file (every layer recomputed,
sharded over all devices) and the same without recomputation.
"""

import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

from sharded_profile import decisions_of, drawn_profile

from mindspeed_autoparallel.planner.sharded.pricing import priced
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.planner.sharded.search import ShardedOptions, search_sharded
from mindspeed_autoparallel.profiles.sharded import CostPoint
from mindspeed_autoparallel.spec.layout import Cluster
from mindspeed_autoparallel.spec.sharded import KEEP, RECOMPUTE, RECOMPUTE_OFFLOAD, ShardingHost, ShardSizes

NODES, PER_NODE, LAYERS = 128, 8, 94
HOST = ShardingHost(
    name="drawn", variant="mindspeed-mm", policies=(KEEP, RECOMPUTE, RECOMPUTE_OFFLOAD), loss_chunks=(0, 1024)
)


def problem_of(seed):
    """Return the profile, the shipped decisions, and their peaks with and without recomputation."""
    points = tuple(
        CostPoint(micro_batch_size=micro, ulysses_size=ulysses, expert_size=expert)
        for micro in (1, 2, 4)
        for ulysses in (1, 2)
        for expert in (1, 2, 4, 8, 16, 32, 64)
    )
    profile = drawn_profile(random.Random(seed), LAYERS, experts=True, points=points, num_experts=128)
    devices = NODES * PER_NODE
    sizes = ShardSizes(num_devices=devices, fully_shard_size=devices, accumulation=4)
    shipped = replace(decisions_of(profile, sizes), policies={"model.layers.{*}": (RECOMPUTE,) * LAYERS})
    problem = Problem(profile, HOST, PER_NODE)
    peaks = [priced(problem, one, 0).memory.peak_bytes for one in (shipped, replace(shipped, policies={}))]
    return profile, shipped, peaks


def main() -> None:
    """Print one line for each seed and memory."""
    seconds, seeds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0, [int(seed) for seed in sys.argv[2:]] or [0]
    for seed in seeds:
        profile, shipped, (least, most) = problem_of(seed)
        for share in (0.1, 0.5, 1.0):
            limit = int(least + share * (most - least))
            begin = time.process_time()
            cluster = Cluster(num_nodes=NODES, devices_per_node=PER_NODE, memory_limit_bytes=limit)
            plan = search_sharded(profile, cluster, HOST, shipped, ShardedOptions(time_limit_s=seconds))
            counts = Counter(verdict.outcome for verdict in plan.search.verdicts)
            print(
                f"seed {seed}, memory {share:g} of the way: gap {plan.search.gap_fraction:.2%} after "
                f"{time.process_time() - begin:.1f} s; {plan.decisions.sizes.label()} {plan.step.total_us / 1000:.0f} ms, "
                f"shipped {plan.baselines[0].step.total_us / 1000:.0f} ms; {dict(counts)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
