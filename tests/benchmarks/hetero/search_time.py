"""Time and proof of the hetero search on the planner's synthetic profile (32 + 80 layers), by number of nodes of 8.

python tests/benchmarks/hetero/search_time.py 16 128 512
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

from synthetic_profile import synthetic_profile

from mindspeed_autoparallel.planner.hetero.search import search_hetero
from mindspeed_autoparallel.spec import Cluster

if __name__ == "__main__":
    profile = synthetic_profile()
    print("| devices | batch | layouts | solved | search s | status | gap | plan |\n" + "| --- " * 8 + "|")
    for num_nodes in map(int, sys.argv[1:]):
        batch, started = 32 * num_nodes if num_nodes < 128 else 16 * num_nodes, time.monotonic()
        plan = search_hetero(profile, Cluster(num_nodes=num_nodes, devices_per_node=8), batch)
        seconds, found = time.monotonic() - started, plan.search
        label = plan.layout.label().replace("|", "/")
        print(
            f"| {8 * num_nodes} | {batch} | {found.num_configurations} | {found.num_solved} | {seconds:.1f} | "
            f"{found.status} | {found.gap_fraction:.1e} | {label} |",
            flush=True,
        )
