"""What it gains that the layer of multi-token prediction may lie on another stage than the loss.

python tests/benchmarks/plan/mtp_placed_alone.py [processor seconds a split]

Every row of the league that has such a layer, and a stage before the last that may hold it (not the first rank's: two
ranks have none), is split twice within the memory of the layout by hand: with the layer free to lie anywhere after the
decoder, and beside the loss, as `plan` and `split` place it. The output layer of the further token stays where the loss
is, as in Megatron. Left out, both in favour of the free layout: Megatron sends twice as much to the loss then, and
exchanges shapes before every message of the pipeline.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from league import LEAGUE, placement_of, problem_of, string_of

from mindspeed_autoparallel.planner.split import Joint, solve, stage_memory


def main() -> None:
    """Print a row per layout."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    print("| model | PP x VPP | free, ms | bound, ms | beside the loss, ms | bound, ms | free layout |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for entry in LEAGUE:
        if not entry.model.get("mtp_layers") or entry.pipeline < 3:
            continue
        problem = problem_of(entry)
        limit = max(stage_memory(problem, placement_of(problem, entry.layout)))
        free = dataclasses.replace(problem, memory_limit=(limit,) * problem.num_stages)
        segments = list(free.segments)
        last = len(segments) - 1
        assert segments[last - 1].name.startswith("m")
        together = Joint(before=last - 1, segment=last, num_layers=1)
        beside = dataclasses.replace(free, joints=(together,))
        first, second = (solve(one, time_limit_s=seconds) for one in (free, beside))
        figures = (first.step_time, first.lower_bound, second.step_time, second.lower_bound)
        shown = " | ".join(f"{figure / 1e3:.3f}" for figure in figures)
        sizes = f"{entry.pipeline} x {entry.virtual}"
        print(f"| {entry.name} | {sizes} | {shown} | {string_of(free, first.placement)} |", flush=True)


if __name__ == "__main__":
    main()
