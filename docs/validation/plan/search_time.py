"""Time, gap and memory of the search on the synthetic profile, by cluster size; prints a table row per size.

    python docs/validation/plan/search_time.py 8 64 1024
"""

from __future__ import annotations

import resource
import sys
import time

from synthetic_profile import synthetic_profile

from mindspeed_autoparallel.planner.search import search
from mindspeed_autoparallel.spec import Cluster

DEVICES_PER_NODE = 16

if __name__ == "__main__":
    profile = synthetic_profile()
    print("| devices | batch | layouts | solved | search s | gap | plan | peak memory MiB |")
    for num_nodes in map(int, sys.argv[1:]):
        cluster = Cluster(num_nodes=num_nodes, devices_per_node=DEVICES_PER_NODE)
        batch = 2 * cluster.num_devices
        started = time.monotonic()
        plan = search(profile, cluster, batch, with_relaxations="--relaxations" in sys.argv)
        seconds = time.monotonic() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {cluster.num_devices} | {batch} | {plan.search.num_configurations} | {plan.search.num_solved} | "
            f"{seconds:.1f} | {plan.search.gap_fraction:.3%} | {plan.layout.label()} | {peak:.0f} |",
            flush=True,
        )
