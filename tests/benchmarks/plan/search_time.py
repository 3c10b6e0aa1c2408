"""Time, gap and memory of `plan` on the synthetic profile, by cluster size: each row is the command in a fresh process.

    python tests/benchmarks/plan/search_time.py 4 8 16 64 256 1024 --svg search_time.svg

The arguments are numbers of nodes of 16 devices. Time is that of the whole command: start, search, relaxations, JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from search_time_plot import draw
from synthetic_profile import synthetic_profile

DEVICES_PER_NODE = 16


def measure(profile: Path, num_nodes: int, more: list[str]) -> tuple[dict[str, object], float, float]:
    """The plan, wall seconds of the command, CPU seconds of it and its processes."""
    devices = num_nodes * DEVICES_PER_NODE
    command = [sys.executable, "-m", "mindspeed_autoparallel.cli.main", "plan", "--profile", str(profile), "--json"]
    command += ["--nnodes", str(num_nodes), "--nproc-per-node", str(DEVICES_PER_NODE)]
    command += ["--global-batch-size", str(2 * devices), *more]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), seconds, cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("nodes", type=int, nargs="+")
    parser.add_argument("--svg", type=Path)
    arguments, more = parser.parse_known_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| devices | batch | layouts | solved | command s | CPU s | gap | status | plan |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    points = []
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        synthetic_profile().write(profile)
        for num_nodes in arguments.nodes:
            plan, seconds, cpu = measure(profile, num_nodes, more)
            devices = num_nodes * DEVICES_PER_NODE
            points.append((devices, seconds))
            search, layout = plan["search"], plan["layout"]
            sizes = f"PP{layout['pipeline_size']} TP{layout['tensor_size']} DP{layout['data_size']}"
            print(
                f"| {devices} | {2 * devices} | {search['num_configurations']} | {search['num_solved']} "
                f"| {seconds:.1f} | {cpu:.1f} | {search['gap_fraction']:.3%} | {search['status']} "
                f"| {sizes} MBS{layout['micro_batch_size']} |",
                flush=True,
            )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"most memory of one process: {peak:.0f} MiB")
    if arguments.svg is not None:
        arguments.svg.write_text(draw(points))


if __name__ == "__main__":
    main()
