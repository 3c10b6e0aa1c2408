"""Split one pipeline: layers and recomputation of every stage, proved optimal.

split --profile model_profile.json --pipeline-size 8 --num-microbatches 32 --memory-limit-mib 62000 --json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.cli import _profile_source, _split_dualpipev, _split_group_sizes
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.units import GIB, MIB, NS_PER_MS
from mindspeed_autoparallel.whole_numbers import LARGE, LARGEST, MEMORY_MIB, POSITIVE, WholeNumber

if TYPE_CHECKING:
    from mindspeed_autoparallel.planner.split import Baseline, Placement, SplitProblem, SplitSolution

MAX_PLANS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--profile", type=Path, required=True, help="our profile or MindSpeed's model_profile.json")
    add("--pipeline-size", type=int, required=True, help="stages")
    add("--num-microbatches", type=LARGE, required=True, help="microbatches of one step")
    add("--memory-limit-mib", type=MEMORY_MIB, required=True, help="per device")
    _profile_source.add_stages_link(parser)
    add(
        "--schedule",
        choices=("1f1b", "interleaved", "gpipe", "dualpipev"),
        default="1f1b",
        help="schedule; dualpipev is MindSpeed's, with an even split, compared with the best split of 1f1b",
    )
    add("--virtual-pipeline-size", type=int, default=1, help="chunks per stage (interleaved)")
    add(
        "--microbatch-group-size",
        type=int,
        default=0,
        help="consecutive microbatches of one chunk (interleaved; default: searched)",
    )
    add(
        "--no-standalone-ends",
        action="store_true",
        help="plan no stage of the embedding or the output layer alone, which only hosts with "
        "--pipeline-model-parallel-layout train",
    )
    add("--time-limit-s", type=POSITIVE, default=60.0, help="then end with the best plan so far and its bound")
    add(
        "--top-k",
        type=WholeNumber(least=1, most=MAX_PLANS),
        default=1,
        help=f"number of best plans to report, up to {MAX_PLANS}",
    )
    add("--what-if", action="store_true", help="also report the gain from more memory or microbatches")
    add("--seed", type=WholeNumber(least=0, most=LARGEST), default=0, help="seed of the integer solver")
    add("--json", action="store_true", help="print only JSON")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.planner.split import baselines
    from mindspeed_autoparallel.planner.split.from_profile import problem_from_profile
    from mindspeed_autoparallel.planner.split.group_sizes import sizes_to_try
    from mindspeed_autoparallel.profiles import read_profile

    profile = read_profile(arguments.profile, p2p_gbps=arguments.p2p_gbit_per_s * 1e9 / 8 / GIB)

    def problem_of(
        num_microbatches: int, memory_limit_mib: float, *, virtual: bool = True, alone: bool = True
    ) -> SplitProblem:
        sizes = sizes_to_try(arguments.pipeline_size, num_microbatches) if arguments.schedule == "interleaved" else ()
        group_size = arguments.microbatch_group_size or (sizes[0] if sizes else 0)
        return problem_from_profile(
            profile,
            num_stages=arguments.pipeline_size,
            num_microbatches=num_microbatches,
            memory_limit_mib=memory_limit_mib,
            schedule=arguments.schedule if virtual and arguments.schedule != "dualpipev" else "1f1b",
            num_chunks=arguments.virtual_pipeline_size if virtual else 1,
            microbatch_group_size=group_size if virtual else 0,
            standalone_ends=alone and not arguments.no_standalone_ends,
        )

    if arguments.schedule == "dualpipev":
        plain = problem_of(arguments.num_microbatches, arguments.memory_limit_mib, virtual=False)
        return _split_dualpipev.run(arguments, profile, plain)
    problem = problem_of(arguments.num_microbatches, arguments.memory_limit_mib)
    try:
        problem, solution, sizes = _split_group_sizes.solved(problem, arguments)
    except InfeasiblePlan as error:
        failure = _infeasible(problem, error, arguments)
        if not arguments.json:
            raise InfeasiblePlan(failure["reason"]) from error
        print(json.dumps(failure))
        return error.exit_code
    # Simple rules count layers, and keep embedding and output layer with the first and last one.
    try:
        simple = baselines(problem_of(arguments.num_microbatches, arguments.memory_limit_mib, alone=False))
    except ConfigError:
        simple = ()  # fewer layers than stages
    result = _result(problem, solution, simple) | sizes
    if problem.num_chunks > 1:
        plain = problem_of(arguments.num_microbatches, arguments.memory_limit_mib, virtual=False)
        result["without_virtual_stages"] = _without_virtual_stages(plain, solution, arguments)
    if arguments.top_k > 1:
        result |= _alternatives(problem, solution, arguments)
    if arguments.what_if:
        result["what_if"] = _what_if(solution, problem_of, arguments)
    if arguments.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0


def _infeasible(problem: SplitProblem, error: InfeasiblePlan, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the reason, and the smallest limit with a plan; status ``unknown`` if time ran out before."""
    from mindspeed_autoparallel.planner.split import StoppedEarly
    from mindspeed_autoparallel.planner.split.analysis import least_excess

    if isinstance(error, StoppedEarly):
        return {"status": "unknown", "reason": str(error)}
    limit = arguments.memory_limit_mib
    # Searched in whole MiB.
    first = math.ceil(limit)
    more = first * MIB - int(limit * MIB)
    whole = replace(problem, memory_limit=tuple(size + more for size in problem.memory_limit))
    try:
        excess = least_excess(whole, resolution=MIB, time_limit_s=arguments.time_limit_s)
    except StoppedEarly:
        return {"status": "infeasible", "reason": f"no plan fits in {limit:g} MiB per device."}
    needed = first + -(-excess // MIB)
    reason = (
        f"no plan fits in {limit:g} MiB per device, however layers are split and recomputed. The smallest "
        f"--memory-limit-mib that has a plan is {needed}; or raise --pipeline-size above {problem.num_stages}."
    )
    return {"status": "infeasible", "reason": reason, "smallest_memory_limit_mib": needed}


def _result(problem: SplitProblem, solution: SplitSolution, simple: tuple[Baseline, ...]) -> dict[str, object]:
    from mindspeed_autoparallel.planner.split.analysis import limits_of

    limits = limits_of(problem, solution)
    return {
        "status": solution.status,
        "step_time_ms": solution.step_time / NS_PER_MS,
        "lower_bound_ms": solution.lower_bound / NS_PER_MS,
        **_by_module(problem, solution.placement),
        **_prediction(problem, solution.placement),
        "stage_memory_mib": [size / MIB for size in solution.stage_memory],
        "rounds": solution.rounds,
        "solve_seconds": round(solution.solve_seconds, 4),
        "baselines": {
            plan.name: {
                "step_time_ms": plan.step_time / NS_PER_MS,
                "fits": plan.fits,
                **_by_module(plan.problem, plan.placement),
            }
            for plan in simple
        },
        "limits": {
            "slowest_stage": limits.slowest_stage,
            "share_of_stage": [round(share, 4) for share in limits.share_of_stage],
            "share_of_messages": round(limits.share_of_messages, 4),
            "recomputing_stages": list(limits.recomputing_stages),
        },
    }


def _alternatives(problem: SplitProblem, solution: SplitSolution, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the plans after the best one, fastest first."""
    from mindspeed_autoparallel.planner.split import stage_memory
    from mindspeed_autoparallel.planner.split.alternatives import best_plans

    plans, complete = best_plans(problem, solution, arguments.top_k, arguments.time_limit_s)
    shown = _by_module(problem, solution.placement)["placement"]
    others = [item for item in plans if _by_module(problem, item[0])["placement"] != shown][: arguments.top_k - 1]
    return {
        "alternatives": [
            {
                "step_time_ms": step / NS_PER_MS,
                **_by_module(problem, plan),
                "stage_memory_mib": [size / MIB for size in stage_memory(problem, plan)],
            }
            for plan, step in others
        ],
        "alternatives_proved": complete,
    }


def _without_virtual_stages(
    plain: SplitProblem, solution: SplitSolution, arguments: argparse.Namespace
) -> dict[str, object]:
    """Solve with one chunk per stage, for the gain of virtual stages. Null if no plan fits or was found in time."""
    from mindspeed_autoparallel.planner.split import solve

    try:
        other = solve(plain, time_limit_s=arguments.time_limit_s, seed=arguments.seed)
    except InfeasiblePlan:
        return {"step_time_ms": None, "gain_fraction": None}
    gain = 1 - solution.step_time / other.step_time if other.step_time else 0.0
    return {"step_time_ms": other.step_time / NS_PER_MS, "gain_fraction": round(gain, 6)}


def _what_if(
    solution: SplitSolution, problem_of: Callable[[int, float], SplitProblem], arguments: argparse.Namespace
) -> list[dict[str, object]]:
    """Solve again with one more GiB per device, and with twice the microbatches (gain per microbatch)."""
    from mindspeed_autoparallel.planner.split import solve

    found: list[dict[str, object]] = []
    for change, times, more_mib in (("one more GiB per device", 1, GIB // MIB), ("twice the microbatches", 2, 0)):
        problem = problem_of(times * arguments.num_microbatches, arguments.memory_limit_mib + more_mib)
        try:
            other = solve(problem, time_limit_s=arguments.time_limit_s, seed=arguments.seed)
        except InfeasiblePlan:
            # Up to the number of stages, more microbatches hold more activations.
            found.append({"change": change, "status": "infeasible", "step_time_ms": None, "gain_fraction": None})
            continue
        gain = 1 - other.step_time / times / solution.step_time if solution.step_time else 0.0
        found.append(
            {
                "change": change,
                "status": other.status,
                "step_time_ms": other.step_time / NS_PER_MS,
                "gain_fraction": round(gain, 6),
            }
        )
    return found


def _by_module(problem: SplitProblem, placement: Placement) -> dict[str, dict[str, list[int]]]:
    """Return layers, and recomputed ones, by module and virtual stage (= stage without virtual stages)."""
    layers: dict[str, list[tuple[int, ...]]] = {}
    for segment, rows in zip(problem.segments, placement, strict=True):
        # Ends that are separate units are on the first and the last stage, see also ``_prediction``.
        if segment.beside is None and not segment.name.endswith(("_pre", "_post", "_prediction")):
            # A module with layers of several kinds has several segments.
            before = layers.get(segment.name) or [(0,) * problem.num_virtual] * len(rows)
            layers[segment.name] = [tuple(map(sum, zip(a, b, strict=True))) for a, b in zip(before, rows, strict=True)]
    return {
        "placement": {name: [sum(column) for column in zip(*rows, strict=True)] for name, rows in layers.items()},
        "recompute": {name: [sum(column[1:]) for column in zip(*rows, strict=True)] for name, rows in layers.items()},
    }


def _prediction(problem: SplitProblem, placement: Placement) -> dict[str, int]:
    """Return the virtual stage of the multi-token prediction layers, if it differs from the loss's."""
    rows = [rows for s, rows in zip(problem.segments, placement, strict=True) if s.name.endswith("_prediction")]
    stage = rows[0][0].index(1) if rows else problem.num_virtual - 1
    return {"prediction_stage": stage} if stage < problem.num_virtual - 1 else {}


def _print(result: dict[str, Any]) -> None:
    num_stages = len(result["stage_memory_mib"])
    for stage in range(num_stages):
        cells = [
            f"{name} {_by_chunk(result['placement'][name][stage::num_stages])} "
            f"({_by_chunk(result['recompute'][name][stage::num_stages])} recomputed)"
            for name in result["placement"]
        ]
        print(f"stage {stage:3d}  {'  '.join(cells)}  {result['stage_memory_mib'][stage]:.0f} MiB")
    if "prediction_stage" in result:
        print(f"prediction layers apart from the loss: virtual stage {result['prediction_stage']}")
    others = [f"{name} {plan['step_time_ms']:.2f} ms" for name, plan in result["baselines"].items()]
    print(
        f"step {result['step_time_ms']:.3f} ms, {result['status']} (bound {result['lower_bound_ms']:.3f} ms), "
        f"{result['solve_seconds']:.2f} s; {', '.join(others) or 'simple rules leave a stage empty'}"
    )
    limits = result["limits"]
    slowest = limits["slowest_stage"]
    stages = ", ".join(map(str, limits["recomputing_stages"])) or "none"
    print(
        f"limits: stage {slowest} takes {limits['share_of_stage'][slowest]:.0%} of the critical path, messages "
        f"{limits['share_of_messages']:.1%}; stages that recompute to fit: {stages}"
    )
    if text := _split_group_sizes.text(result):
        print(text)
    if (plain := result.get("without_virtual_stages")) and plain["step_time_ms"] is not None:
        print(f"without virtual stages {plain['step_time_ms']:.3f} ms: they save {plain['gain_fraction']:.2%}")
    elif plain:
        print("without virtual stages no plan was found")
    for item in result.get("what_if", ()):
        if item["step_time_ms"] is None:
            print(f"with {item['change']}: no plan fits")
        else:
            print(f"with {item['change']}: {item['step_time_ms']:.3f} ms, saves {item['gain_fraction']:.2%} per sample")
    for item in result.get("alternatives", ()):
        print(f"or {item['step_time_ms']:.3f} ms: {item['placement']}")


def _by_chunk(counts: list[int]) -> str:
    """Return ``3+4``: the counts of a stage's chunks."""
    return "+".join(map(str, counts))
