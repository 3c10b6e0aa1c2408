"""Time and proof of the inner problem, 32 + 80 layers, PP 2 to 16, 8 to 128 microbatches, tight to loose memory.

python tests/benchmarks/split/grid.py [deep]   (a quarter of a minute; deep: PP 32 with 64 + 192 layers, a minute or two)
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from model import mindspeed_file, our_file

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split import SplitProblem, solve
from mindspeed_autoparallel.planner.split.analysis import least_excess
from mindspeed_autoparallel.planner.split.from_profile import problem_from_profile
from mindspeed_autoparallel.profiles import Profile, read_profile
from mindspeed_autoparallel.units import MIB

LIMITS = ("tight", "half-tight", "medium", "half-loose", "loose")
"""From 2 % above the least memory that has a plan to what keeps every layer whole, in even steps."""


def problem_of(profile: Profile, stages: int, microbatches: int, share: float) -> tuple[SplitProblem, int]:
    """The problem at ``share`` of the way from tight to loose, and its limit in MiB."""

    def at(limit_mib: float) -> SplitProblem:
        return problem_from_profile(
            profile, num_stages=stages, num_microbatches=microbatches, memory_limit_mib=limit_mib
        )

    start = at(2**20)
    least = 2**20 + least_excess(start) / MIB
    whole = sum(s.num_layers * max(s.kinds[0].memory) for s in start.segments) / MIB / stages
    limit = round(1.02 * least + share * max(0.0, 1.5 * whole - 1.02 * least))
    return at(limit), limit


def main() -> None:
    """Print a row per case."""
    deep = sys.argv[1:] == ["deep"]
    size = (64, 192) if deep else (32, 80)
    pipelines = (32,) if deep else (2, 4, 8, 16)
    batches = (512, 128, 64, 32, 16, 8) if deep else (8, 16, 32, 64, 128)
    seconds, cpu = [], []
    print("profile    PP  microbatches  memory      limit_MiB  status    step_ms     gap_%  seconds    cpu_s  rounds")
    with tempfile.TemporaryDirectory() as folder:
        files = {"MindSpeed": mindspeed_file(Path(folder), *size)}
        if not deep:
            files["ours"] = our_file(Path(folder), *size)
        profiles = {name: read_profile(path, p2p_gbps=25.0) for name, path in files.items()}
    for name, profile in profiles.items():
        for stages in pipelines:
            for microbatches in batches:
                for index in range(0, len(LIMITS), 2 if deep else 1):
                    problem, limit = problem_of(profile, stages, microbatches, index / (len(LIMITS) - 1))
                    memory = LIMITS[index]
                    begin, begin_cpu = time.perf_counter(), time.process_time()
                    try:
                        found = solve(problem, time_limit_s=60.0)
                    except InfeasiblePlan as error:
                        print(f"{name:9s} {stages:3d} {microbatches:13d}  {memory:10s} {limit:10d}  {error}")
                        continue
                    seconds.append(time.perf_counter() - begin)
                    cpu.append(time.process_time() - begin_cpu)
                    gap = (1 - found.lower_bound / found.step_time) * 100
                    print(
                        f"{name:9s} {stages:3d} {microbatches:13d}  {memory:10s} {limit:10d}  {found.status:8s} "
                        f"{found.step_time / 1e6:9.1f} {gap:8.4f} {seconds[-1]:8.3f} {cpu[-1]:8.3f} {found.rounds:7d}",
                        flush=True,
                    )
    for name, values in (("wall", seconds), ("CPU", cpu)):
        print(f"{len(values)} cases, {name}: median {statistics.median(values):.3f} s, worst {max(values):.3f} s")


if __name__ == "__main__":
    main()
