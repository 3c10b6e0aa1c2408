"""Split one pipeline: layers and recomputation of every stage, proved optimal.

  split --profile model_profile.json --pipeline-size 8 --num-microbatches 32 --memory-limit-mib 62000 --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.units import MIB

if TYPE_CHECKING:
    from mindspeed_autoparallel.planner.split import Baseline, Placement, SplitProblem, SplitSolution

NS_PER_MS = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", type=Path, required=True, help="our profile or MindSpeed's model_profile.json")
    parser.add_argument("--pipeline-size", type=int, required=True, help="stages")
    parser.add_argument("--num-microbatches", type=int, required=True, help="microbatches of one step")
    parser.add_argument("--memory-limit-mib", type=float, required=True, help="per device")
    parser.add_argument("--p2p-gbps", type=float, default=25.0, help="GiB/s between stages, for MindSpeed's file")
    parser.add_argument("--schedule", choices=("1f1b", "interleaved", "gpipe"), default="1f1b")
    parser.add_argument("--virtual-pipeline-size", type=int, default=1, help="chunks per stage (interleaved)")
    parser.add_argument("--time-limit-s", type=float, default=60.0, help="then the best plan so far, with its bound")
    parser.add_argument("--json", action="store_true", help="print only JSON")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.planner.split import baselines, solve
    from mindspeed_autoparallel.planner.split.from_profile import problem_from_profile
    from mindspeed_autoparallel.profiles import read_profile

    if not 0 < arguments.time_limit_s < float("inf"):
        raise ConfigError(f"--time-limit-s must be above 0, got {arguments.time_limit_s:g}.")
    problem = problem_from_profile(
        read_profile(arguments.profile, p2p_gbps=arguments.p2p_gbps), num_stages=arguments.pipeline_size,
        num_microbatches=arguments.num_microbatches, memory_limit_mib=arguments.memory_limit_mib,
        schedule=arguments.schedule, num_chunks=arguments.virtual_pipeline_size,
    )  # fmt: skip
    try:
        solution = solve(problem, time_limit_s=arguments.time_limit_s)
    except InfeasiblePlan as error:
        if arguments.json:
            print(json.dumps({"status": "infeasible", "reason": str(error)}))
            return error.exit_code
        raise
    result = _result(problem, solution, baselines(problem))
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0


def _result(problem: SplitProblem, solution: SplitSolution, simple: tuple[Baseline, ...]) -> dict[str, Any]:
    return {
        "status": solution.status,
        "step_time_ms": solution.step_time / NS_PER_MS,
        "lower_bound_ms": solution.lower_bound / NS_PER_MS,
        **_by_module(problem, solution.placement),
        "stage_memory_mib": [size / MIB for size in solution.stage_memory],
        "rounds": solution.rounds,
        "solve_seconds": round(solution.solve_seconds, 4),
        "baselines": {
            plan.name: {
                "step_time_ms": plan.step_time / NS_PER_MS, "fits": plan.fits, **_by_module(problem, plan.placement),
            }
            for plan in simple
        },
    }  # fmt: skip


def _by_module(problem: SplitProblem, placement: Placement) -> dict[str, dict[str, list[int]]]:
    """Layers, and those not run plainly, by module and virtual stage (= stage without virtual stages)."""
    layers = {
        segment.name: rows for segment, rows in zip(problem.segments, placement, strict=True) if segment.beside is None
    }
    return {
        "placement": {name: [sum(column) for column in zip(*rows, strict=True)] for name, rows in layers.items()},
        "recompute": {name: [sum(column[1:]) for column in zip(*rows, strict=True)] for name, rows in layers.items()},
    }


def _print(result: dict[str, Any]) -> None:
    for stage in range(len(result["stage_memory_mib"])):
        cells = [
            f"{name} {result['placement'][name][stage]} ({result['recompute'][name][stage]} recomputed)"
            for name in result["placement"]
        ]
        print(f"stage {stage:3d}  {'  '.join(cells)}  {result['stage_memory_mib'][stage]:.0f} MiB")
    others = ", ".join(f"{name} {plan['step_time_ms']:.2f} ms" for name, plan in result["baselines"].items())
    print(
        f"step {result['step_time_ms']:.3f} ms, {result['status']} (bound {result['lower_bound_ms']:.3f} ms), "
        f"{result['solve_seconds']:.2f} s; {others}"
    )
