"""``split --schedule dualpipev``: MindSpeed's only split for it, compared with the best one of 1F1B."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.units import MIB, NS_PER_MS

if TYPE_CHECKING:
    from mindspeed_autoparallel.planner.split import SplitProblem
    from mindspeed_autoparallel.profiles import Profile

FLAGS = ("--schedules-method", "dualpipev")


def run(arguments: argparse.Namespace, profile: Profile, plain: SplitProblem) -> int:
    """Print the split that MindSpeed would run, and ``plain``, the best split of 1F1B."""
    from mindspeed_autoparallel.planner.split import solve
    from mindspeed_autoparallel.planner.split.dualpipev import dualpipev_split

    if arguments.virtual_pipeline_size != 1 or arguments.microbatch_group_size:
        raise ConfigError("DualPipeV has two chunks per rank and no groups: remove virtual stages and group sizes.")
    if arguments.what_if or arguments.top_k > 1:
        raise ConfigError("DualPipeV has only one split: remove --what-if and --top-k.")
    found = dualpipev_split(
        profile,
        num_stages=arguments.pipeline_size,
        num_microbatches=arguments.num_microbatches,
        memory_limit_mib=arguments.memory_limit_mib,
    )
    size = arguments.pipeline_size
    layers = profile.model.num_layers // (2 * size)
    result: dict[str, object] = {
        "status": "even",
        "step_time_ms": found.step_time / NS_PER_MS,
        "layers_per_chunk": layers,
        "chunks": [[rank, 2 * size - 1 - rank] for rank in range(size)],
        "recompute": found.recompute,
        "stage_memory_mib": [size_bytes / MIB for size_bytes in found.stage_memory],
        "flags": list(FLAGS),
        "without_dualpipev": {"step_time_ms": None, "stage_memory_mib": None, "gain_fraction": None},
    }
    try:
        other = solve(plain, time_limit_s=arguments.time_limit_s, seed=arguments.seed)
    except InfeasiblePlan:
        pass
    else:
        result["without_dualpipev"] = {
            "step_time_ms": other.step_time / NS_PER_MS,
            "stage_memory_mib": [size_bytes / MIB for size_bytes in other.stage_memory],
            "gain_fraction": round(1 - found.step_time / other.step_time, 6) if other.step_time else 0.0,
        }
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0


def _print(result: dict[str, Any]) -> None:
    for rank, (chunks, size_mib) in enumerate(zip(result["chunks"], result["stage_memory_mib"], strict=True)):
        print(f"stage {rank:3d}  chunks {chunks[0]} and {chunks[1]} of the chain  {size_mib:.0f} MiB")
    print(
        f"step {result['step_time_ms']:.3f} ms: {result['layers_per_chunk']} layers in every chunk, recompute "
        f"{result['recompute']}, whole backwards; {' '.join(result['flags'])}"
    )
    plain = result["without_dualpipev"]
    if plain["step_time_ms"] is None:
        print("1F1B: no plan was found")
    else:
        print(
            f"1F1B, best split: {plain['step_time_ms']:.3f} ms, up to {max(plain['stage_memory_mib']):.0f} MiB; "
            f"DualPipeV saves {plain['gain_fraction']:.2%}"
        )
