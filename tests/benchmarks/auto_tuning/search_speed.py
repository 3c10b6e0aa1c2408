"""How long the search over traced configurations takes, and that pruning loses nothing.

python tests/benchmarks/auto_tuning/search_speed.py [--check]

The profile is made of formulas (tests/helpers/language_profile.py): only the number of candidates matters here.
``--check`` also solves every candidate of a smaller space and compares the first three.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "helpers"))
from language_profile import language_profile

from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant, Space, enumerate_space
from mindspeed_autoparallel.planner.tuner.placements import improved, solve
from mindspeed_autoparallel.planner.tuner.search import search
from mindspeed_autoparallel.spec import Cluster

CASES = ((2, 32, 60_000, 1, (1, 2, 3, 4)), (16, 80, 40_000, 1, (1, 2, 3, 4)), (8, 96, 60_000, 4, (1, 2, 3, 4, 6, 8)))
"""Nodes of 8 devices, layers, MiB per device, variants of configurations, virtual stages."""


def main() -> int:
    """Print one line per cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    columns = f"{'devices':>7s} {'batch':>6s} {'legal':>6s} {'solved':>6s} {'enumerate_s':>11s} {'search_s':>8s}"
    print(f"{columns} {'cpu_s':>6s}  best")
    for nodes, layers, memory, number, chunks in CASES:
        profile = language_profile(num_layers=layers, context=(1, 2, 4), capacity_mib=memory)
        variants = [ProfileVariant(name=str(index), settings={}, profile=profile) for index in range(number)]
        cluster, batch = Cluster(num_nodes=nodes, devices_per_node=8), nodes * 64
        dimensions = Dimensions(virtual_sizes=chunks)
        begin, busy = time.monotonic(), time.process_time()
        space = enumerate_space(variants, cluster, batch, dimensions)
        counted = time.monotonic() - begin
        outcome = search(space, dimensions)
        best = outcome.top[0]
        print(
            f"{cluster.num_devices:7d} {batch:6d} {outcome.num_legal:6d} {outcome.num_solved:6d} {counted:11.2f} "
            f"{outcome.proof.seconds:8.2f} {time.process_time() - busy:6.1f}  "
            f"{best.configuration.layout.label()} recompute {best.recompute}, "
            f"{best.step_us / 1e3:.0f} ms",
            flush=True,
        )
    if check:
        return _check()
    return 0


def _check() -> int:
    variants = [
        ProfileVariant(name="", settings={}, profile=language_profile(num_layers=16, tensor=(1, 2), batches=(1, 2)))
    ]
    cluster, dimensions = Cluster(num_nodes=2, devices_per_node=8), Dimensions()
    space: Space = enumerate_space(variants, cluster, 64, dimensions)
    best: dict[tuple[object, ...], float] = {}
    for configuration in space.configurations:
        found, _ = solve(configuration, dimensions)
        if found is not None:
            step_us = improved(found, dimensions).step_us
            best[configuration.key] = min(step_us, best.get(configuration.key, step_us))
    wanted, given = sorted(best.values())[:3], [found.step_us for found in search(space, dimensions).top]
    same = all(abs(a - b) < 1e-6 * a for a, b in zip(wanted, given, strict=True))
    verdict = "the same" if same else f"{given}, not {wanted}"
    print(f"{len(space.configurations)} candidates solved one by one: the first three are {verdict}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
