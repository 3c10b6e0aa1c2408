"""A plan file replayed, also after an edit by hand: layers, recomputation, batch, stage times, memory limit."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluate
from mindspeed_autoparallel.planner.hetero.assembly import with_encoders
from mindspeed_autoparallel.planner.hetero.backbone import backbone_plan
from mindspeed_autoparallel.planner.layouts.assembly import limits_of_plan
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.spec.plan_records import ROUNDING

_NO_COSTS = "the plan lacks extra.costs, the costs it was planned from: plan again with this release."


def replay(plan: Plan) -> tuple[Plan, Evaluation]:
    """Return the plan with everything predicted anew. Stage times follow the layers, unless they were edited.

    Raises ``PlanError`` for a plan without the costs it was made from, and for an edit that requires another plan.
    """
    again, found = _of_pipeline(plan) if plan.hetero is None else _of_backbone(plan)
    if not _edited_times(plan) and _is_as_searched(plan, again):
        return again, found
    search, extra = again.search.without_proof, replace(again.extra, unoverlapped_us=0.0)
    return replace(again, baselines=(), alternatives=(), search=search, data=None, extra=extra), found


def _is_as_searched(plan: Plan, again: Plan) -> bool:
    """Return whether the replay gives the file's own step and peaks."""
    return isclose(plan.step.total_us, again.step.total_us, rel_tol=ROUNDING) and [
        (rank.peak_bytes, rank.limit_bytes) for rank in plan.memory
    ] == [(rank.peak_bytes, rank.limit_bytes) for rank in again.memory]


def _of_backbone(plan: Plan) -> tuple[Plan, Evaluation]:
    """Replay the backbone of a hetero plan, whose encoders keep their phases; the evaluation is of the backbone alone.

    Raises ``PlanError`` where an edit would change the encoders' phases: the batch, or a limit they do not fit in.
    """
    record = plan.hetero
    assert record is not None
    limit = plan.memory[0].limit_bytes
    if plan.cluster.memory_limit_bytes is not None:
        limit = plan.cluster.memory_limit_bytes
    left = limit - record.reserved_bytes
    if left <= 0:
        raise PlanError(f"the encoders hold {record.reserved_bytes} bytes, the limit is {limit}: plan again.")
    batches = {phase.num_macro_batches: phase for phase in record.encoders}
    for count, phase in batches.items():
        if -(-plan.num_microbatches // phase.layout.micro_batch_scale) != count:
            raise PlanError(
                f"{phase.module} was planned for {count} batches of {phase.layout.micro_batch_scale} microbatches, the "
                f"plan now has {plan.num_microbatches} microbatches. Plan again for another global batch."
            )
    inner = replace(backbone_plan(plan), cluster=replace(plan.cluster, memory_limit_bytes=left))
    again, found = _of_pipeline(inner)
    whole = replace(
        again,
        hetero=record,
        layout=plan.layout,
        model=plan.model,
        cluster=plan.cluster,
        # Baselines were of the whole step already.
        baselines=tuple(
            replace(base, step_us=None if base.step_us is None else base.step_us - record.total_us)
            for base in again.baselines
        ),
    )
    return with_encoders(whole, limit), found


def _of_pipeline(plan: Plan) -> tuple[Plan, Evaluation]:
    """Replay a plan in which all modules share one pipeline."""
    edited = _edited_times(plan)
    profile = planned_costs(plan)
    _check_edit(plan)
    expected = plan.layout.num_microbatches(plan.global_batch_size)
    if plan.num_microbatches != expected:
        raise PlanError(
            f"num_microbatches is {plan.num_microbatches}, but a global batch of {plan.global_batch_size} gives "
            f"{expected}. Edit global_batch_size and num_microbatches together."
        )
    found = evaluate(
        profile, plan.cluster, plan.layout, ModulePlacement.of_plan(plan), plan.global_batch_size, stage_times_us=edited
    )
    again = replace(
        plan,
        stages=found.stages,
        memory=found.memory,
        step=found.step,
        throughput_tokens_per_s_per_device=found.throughput,
        search=replace(plan.search, limits=limits_of_plan(found)),
    )
    return again, found


def planned_costs(plan: Plan) -> Profile:
    """Return the costs of the plan's own TP, CP, EP and micro batch size; ``PlanError`` where they are missing."""
    if not plan.extra.costs:
        raise PlanError(_NO_COSTS)
    return Profile.parse(plan.extra.costs, "extra.costs")


def _edited_times(plan: Plan) -> dict[int, tuple[float, float]]:
    """Return forward and backward in microseconds of the virtual stages whose times differ from the planned ones.

    Raises ``PlanError`` for a negative time, and for a plan without what it was planned from.
    """
    if not plan.extra.costs or not plan.extra.stage_times_us:
        raise PlanError(_NO_COSTS)
    before = plan.extra.stage_times_us
    edited: dict[int, tuple[float, float]] = {}
    for index, stage in enumerate(plan.stages):
        times = (stage.forward_us, stage.backward_us)
        if index < len(before) and times != before[index]:
            if min(times) < 0:
                raise PlanError(f"stage {index}: times must not be negative, got {times[0]} and {times[1]} us.")
            edited[index] = times
    return edited


def _check_edit(plan: Plan) -> None:
    """Raise ``PlanError`` for edits that the plan file's own checks miss."""
    if plan.layout.num_devices != plan.cluster.num_devices:
        raise PlanError(
            f"{plan.layout.label()} needs {plan.layout.num_devices} devices, but the cluster has "
            f"{plan.cluster.num_devices}. Edit layout and cluster together."
        )
