"""Combined 1F1B and DualPipeV beside plain layouts of one mixture of experts, under the same analytic costs.

python tests/benchmarks/plan/more_schedules.py
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.rank_memory import measured_at
from mindspeed_autoparallel.planner.split import solve
from mindspeed_autoparallel.planner.split.dualpipev import dualpipev_split
from mindspeed_autoparallel.planner.split.from_profile import problem_from_profile
from mindspeed_autoparallel.predict.analytic_profile import analytic_profile
from mindspeed_autoparallel.predict.model_file import Section
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.units import GIB, MIB

MODEL = {
    "type": "moe",
    "num_layers": 48,
    "hidden": 2048,
    "ffn": 6144,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 128,
    "seq": 4096,
    "vocab": 151936,
    "num_experts": 128,
    "topk": 8,
    "moe_ffn": 768,
}
"""The sizes of Qwen3-30B-A3B."""
BATCH, SECONDS = 256, 10.0


def _points() -> list[Layout]:
    found = []
    for size, chunks, expert in ((1, 1, 8), (1, 1, 16), (2, 2, 8), (2, 4, 8), (4, 2, 8)):
        layout = Layout(
            pipeline_size=size,
            virtual_size=chunks,
            data_size=32 // size,
            expert_size=expert,
            schedule="interleaved" if chunks > 1 else "1f1b",
        )
        found += [layout, replace(layout, paired=True)]
    return found


def _with_point(profile: Profile, layout: Layout) -> Profile:
    return replace(profile, measurements=(profile.at(measured_at(layout)),))  # type: ignore[arg-type]  # it is there


def main() -> None:
    """Print a row per layout."""
    profile = analytic_profile([Section("text_decoder", MODEL)], find_device("H100"), 8)
    cluster = Cluster(num_nodes=4, devices_per_node=8)
    print("| layout | step ms | highest peak GiB | recomputed layers |\n| --- | --- | --- | --- |")
    for layout in _points():
        options = SearchOptions(layouts=[layout], time_limit_s=SECONDS, with_relaxations=False, num_workers=1)
        try:
            plan = search(_with_point(profile, layout), cluster, BATCH, options)
        except AutoParallelError as error:
            print(f"| {layout.label()} | - | {str(error)[:80]} | |", flush=True)
            continue
        peak = max(rank.peak_bytes for rank in plan.memory) / GIB
        again = sum(count for stage in plan.stages for kinds in stage.recompute.values() for count in kinds.values())
        print(f"| {layout.label()} | {plan.step.total_us / 1000:.1f} | {peak:.1f} | {again} |", flush=True)
    print("\n| 4 ranks, EP8, microbatches | DualPipeV ms | GiB | recompute | 1F1B, best split ms | GiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    point = _with_point(profile, Layout(pipeline_size=4, data_size=8, expert_size=8))
    for count in (8, 16, 64):
        limit_mib = 1000 * GIB / MIB
        found = dualpipev_split(point, num_stages=4, num_microbatches=count, memory_limit_mib=limit_mib)
        problem = problem_from_profile(point, num_stages=4, num_microbatches=count, memory_limit_mib=limit_mib)
        plain = solve(problem, time_limit_s=SECONDS)
        print(
            f"| {count} | {found.step_time / 1e6:.2f} | {max(found.stage_memory) / GIB:.1f} | {found.recompute} | "
            f"{plain.step_time / 1e6:.2f} | {max(plain.stage_memory) / GIB:.1f} |"
        )


if __name__ == "__main__":
    main()
