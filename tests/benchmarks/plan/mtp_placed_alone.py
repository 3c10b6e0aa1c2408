"""What it gains that the layer of multi-token prediction may lie on another stage than the loss.

python tests/benchmarks/plan/mtp_placed_alone.py

Every 1F1B row of the league that has such a layer is split twice, within the memory of the layout by hand: with the layer
free to lie anywhere after the decoder, and beside the loss, as `plan` and `split` place it. Both are proved.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from league import LEAGUE, placement_of, problem_of, string_of

from mindspeed_autoparallel.planner.split import solve, stage_memory


def main() -> None:
    """Print a row per layout."""
    print("| model | PP | free, ms | bound, ms | beside the loss, ms | bound, ms | free layout |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for entry in LEAGUE:
        if not entry.model.get("mtp_layers") or entry.virtual > 1:
            continue
        problem = problem_of(entry)
        limit = max(stage_memory(problem, placement_of(problem, entry.layout)))
        free = dataclasses.replace(problem, memory_limit=(limit,) * problem.num_stages)
        segments = list(free.segments)
        last = len(segments) - 1
        assert segments[last - 1].name.startswith("m")
        segments[last - 1] = dataclasses.replace(segments[last - 1], beside=last)
        beside = dataclasses.replace(free, segments=tuple(segments))
        first, second = (solve(one, time_limit_s=60) for one in (free, beside))
        figures = (first.step_time, first.lower_bound, second.step_time, second.lower_bound)
        shown = " | ".join(f"{figure / 1e3:.3f}" for figure in figures)
        print(f"| {entry.name} | {entry.pipeline} | {shown} | {string_of(free, first.placement)} |", flush=True)


if __name__ == "__main__":
    main()
