"""Replay of a plan in which all modules share one pipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isclose

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluate
from mindspeed_autoparallel.planner.layouts.assembly import COSTS, STAGE_TIMES, limits_of_plan
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.spec.plan import EDITED, ROUNDING


def replay_pipeline(plan: Plan) -> tuple[Plan, Evaluation]:
    """Return the plan with everything predicted anew; see ``planner.replay``."""
    if COSTS not in plan.extra or STAGE_TIMES not in plan.extra:
        raise PlanError(f"the plan lacks extra.{COSTS}, what it was planned from: plan again with this release.")
    try:
        costs, planned = json.loads(plan.extra[COSTS]), json.loads(plan.extra[STAGE_TIMES])
        before = [(float(forward), float(backward)) for forward, backward in planned]
    except (ValueError, TypeError) as error:
        raise PlanError(f"extra.{COSTS} or extra.{STAGE_TIMES} of the plan is broken: {error}.") from error
    profile = Profile.parse(costs, f"extra.{COSTS}")
    _check_edit(plan)
    expected = plan.layout.num_microbatches(plan.global_batch_size)
    if plan.num_microbatches != expected:
        raise PlanError(
            f"num_microbatches is {plan.num_microbatches}, but a global batch of {plan.global_batch_size} gives "
            f"{expected}. Edit global_batch_size and num_microbatches together."
        )
    edited: dict[int, tuple[float, float]] = {}
    for index, stage in enumerate(plan.stages):
        times = (stage.forward_us, stage.backward_us)
        if index < len(before) and times != before[index]:
            if min(times) < 0:
                raise PlanError(f"stage {index}: times must not be negative, got {times[0]} and {times[1]} us.")
            edited[index] = times
    found = evaluate(
        profile, plan.cluster, plan.layout, ModulePlacement.of_plan(plan), plan.global_batch_size, stage_times_us=edited
    )
    searched = replace(plan.search, limits=limits_of_plan(found))
    if edited or not _is_as_searched(plan, found):
        # What was proved of the plan as searched, and compared with it, says nothing of this one.
        plan = replace(plan, baselines=(), alternatives=())
        searched = replace(searched, status=EDITED, lower_bound_us=0.0, gap_fraction=0.0, relaxations=(), verdicts=())
    again = replace(
        plan,
        stages=found.stages,
        memory=found.memory,
        step=found.step,
        throughput_tokens_per_s_per_device=found.throughput,
        search=searched,
    )
    return again, found


def _is_as_searched(plan: Plan, found: Evaluation) -> bool:
    """Return whether the replay gives the file's own step and peaks."""
    peaks = [(rank.peak_bytes, rank.limit_bytes) for rank in plan.memory]
    return isclose(plan.step.total_us, found.step.total_us, rel_tol=ROUNDING) and peaks == [
        (rank.peak_bytes, rank.limit_bytes) for rank in found.memory
    ]


def _check_edit(plan: Plan) -> None:
    """Raise ``PlanError`` for what the plan file's own checks cannot know."""
    if plan.layout.num_devices != plan.cluster.num_devices:
        raise PlanError(
            f"{plan.layout.label()} needs {plan.layout.num_devices} devices, but the cluster has "
            f"{plan.cluster.num_devices}. Edit layout and cluster together."
        )
