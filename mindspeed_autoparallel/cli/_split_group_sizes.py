"""Group sizes of ``split``: searched with the split, or the requested one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.cli._unused_flags import refuse
from mindspeed_autoparallel.units import NS_PER_MS

if TYPE_CHECKING:
    from mindspeed_autoparallel.planner.split import SplitProblem, SplitSolution


def solved(
    problem: SplitProblem, arguments: argparse.Namespace
) -> tuple[SplitProblem, SplitSolution, dict[str, object]]:
    """Return the best split, its problem, and the result's keys on group sizes: none without virtual stages.

    Raises ``ConfigError`` for a group size without virtual stages.
    """
    from mindspeed_autoparallel.planner.split import solve
    from mindspeed_autoparallel.planner.split.group_sizes import solve_group_sizes

    limit, seed = arguments.time_limit_s, arguments.seed
    if problem.num_chunks == 1:
        refuse(arguments, ("microbatch_group_size",), "virtual stages alone have groups (--schedule interleaved).")
        return problem, solve(problem, time_limit_s=limit, seed=seed), {}
    if arguments.microbatch_group_size:
        chosen = {"microbatch_group_size": arguments.microbatch_group_size}
        return problem, solve(problem, time_limit_s=limit, seed=seed), chosen
    found = solve_group_sizes(problem, time_limit_s=limit, seed=seed)
    searched = [
        {
            "size": one.size,
            "step_time_ms": None if one.step_time is None else one.step_time / NS_PER_MS,
            "lower_bound_ms": one.lower_bound / NS_PER_MS if one.was_searched else None,
        }
        for one in found.tried
    ]
    chosen = {"microbatch_group_size": found.problem.microbatch_group_size, "microbatch_group_sizes": searched}
    return found.problem, found.solution, chosen


def text(result: dict[str, Any]) -> str:
    """Return text on the chosen group size and the searched ones; empty without such a search."""
    tried = result.get("microbatch_group_sizes")
    if tried is None:
        return ""
    searched = ", ".join(str(one["size"]) for one in tried if one["lower_bound_ms"] is not None)
    found = f"{result['microbatch_group_size']} microbatches of a chunk in a row; searched: {searched}"
    if left := [str(one["size"]) for one in tried if one["lower_bound_ms"] is None]:
        found += f"; not searched in time, and not covered by the bound: {', '.join(left)}"
    return found
