"""The plan file of a search's winner: evidence, baselines, alternatives, limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluated
from mindspeed_autoparallel.planner.layouts.layout_solver import LayoutResult, simple_splits
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.rank_memory import point_of
from mindspeed_autoparallel.planner.results import release
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan, to_json
from mindspeed_autoparallel.spec.plan_records import Alternative, Baseline, PlannedFrom, RankMemory, SearchRecord
from mindspeed_autoparallel.units import format_bytes


def assemble_plan(
    best: Candidate, result: LayoutResult, others: Sequence[tuple[Candidate, LayoutResult]], record: SearchRecord
) -> Plan:
    """Return the complete ``plan.json``."""
    assert result.evaluation is not None
    # Without a timeline the bubble of a layout with pairs is 0.
    found = evaluated(best, result.evaluation.placement, with_timeline=best.layout.paired)
    plan = plan_of(best.profile, best.cluster, best.layout, found, best.global_batch_size, record)
    return replace(
        plan,
        baselines=tuple(_baseline(name, simple) for name, simple in simple_splits(best, found).items()),
        alternatives=tuple(_alternative(candidate, other) for candidate, other in others),
        search=replace(record, limits=limits_of_plan(found)),
    )


def plan_of(
    profile: Profile, cluster: Cluster, layout: Layout, found: Evaluation, global_batch_size: int, record: SearchRecord
) -> Plan:
    """Return a plan without baselines and alternatives; ``simulate`` uses it as well."""
    notes = []
    # The costs of the profile: those of a search exclude all time that combined 1F1B may hide.
    measurement = point_of(profile, layout)
    assert measurement is not None  # it was evaluated
    if measurement.interpolated_from:
        notes.append(f"{measurement.at.label()} is interpolated from {', '.join(measurement.interpolated_from)}.")
    origin = profile.provenance
    if origin.source == "analytic":
        figures = "; ".join(f"{name} {value}" for name, value in origin.software.items())
        notes.append(f"nothing was measured: all costs are computed for {origin.device} ({figures}).")
    notes += _unmeasured_experts(profile)
    return Plan(
        model=profile.model,
        cluster=cluster,
        layout=layout,
        global_batch_size=global_batch_size,
        num_microbatches=layout.num_microbatches(global_batch_size),
        stages=found.stages,
        memory=found.memory,
        step=found.step,
        throughput_tokens_per_s_per_device=found.throughput,
        baselines=(),
        alternatives=(),
        search=record,
        tool_version=release(),
        profile=origin.as_record(profile.sha256(), tuple(notes)),
        extra=PlannedFrom(
            link_us=found.link_us,
            costs=to_json(replace(profile, measurements=(measurement,))),
            stage_times_us=tuple((stage.forward_us, stage.backward_us) for stage in found.stages),
        ),
    )


def _unmeasured_experts(profile: Profile) -> list[str]:
    """Return a note if the profile has costs for one expert tensor size only."""
    points = [measurement.at for measurement in profile.measurements if measurement.at.tensor_size > 1]
    ways = {point.expert_tensor_size for point in points}
    if len(ways) != 1 or not any(module.num_experts for module in profile.model.modules):
        return []
    known = "equal to TP" if ways == {0} else f"{ways.pop()}"
    return [f"the profile has only expert tensor size (ETP) {known}: other expert tensor sizes are not searched."]


LEAST_SHARE = 0.005
"""Share of the step below which a part is not listed as a limit."""


def limits_of_plan(found: Evaluation) -> tuple[str, ...]:
    """Return a plan's bottlenecks by share of the step, then the rank nearest to its memory limit."""
    step = found.step
    busiest = max(
        range(len(found.memory)),
        key=lambda rank: sum(s.forward_us + s.backward_us for s in found.stages if s.pipeline_rank == rank),
    )
    parts = [
        (step.pipeline_us * (1 - step.bubble_fraction), f"time of pipeline rank {busiest}, the busiest"),
        (step.pipeline_us * step.bubble_fraction, "bubble: ranks waiting for others"),
        (step.data_parallel_us, "gradient reduction over data-parallel replicas"),
        (step.optimizer_us, "optimizer step"),
        (step.embedding_us, "all-reduce of tied embeddings"),
        (2 * sum(found.link_us), "point-to-point messages, once through the pipeline"),
    ]
    return limits_of(parts, step.total_us, found.memory)


def limits_of(parts: Sequence[tuple[float, str]], step_us: float, memory: Sequence[RankMemory]) -> tuple[str, ...]:
    """Return the largest ``parts`` of a step, as shares of it, then the fullest rank."""
    largest = sorted(parts, key=lambda part: -part[0])
    limits = [
        f"{what}: {size_us / step_us:.1%} of the step"
        for size_us, what in largest
        if step_us and size_us / step_us >= LEAST_SHARE
    ]
    return (*limits, fullest_rank(memory))


def fullest_rank(memory: Sequence[RankMemory]) -> str:
    """Return the peak of the rank with the least free memory, and the point of its peak."""
    rank = min(memory, key=lambda rank: (rank.limit_bytes - rank.peak_bytes, rank.pipeline_rank))
    share = rank.peak_bytes / rank.limit_bytes if rank.limit_bytes else math.inf
    return (
        f"memory of pipeline rank {rank.pipeline_rank}: {format_bytes(rank.peak_bytes)} of "
        f"{format_bytes(rank.limit_bytes)} ({share:.1%}) at {rank.peak_point}"
    )


def _baseline(name: str, found: Evaluation) -> Baseline:
    return Baseline(
        name=name,
        step_us=found.step_us,
        feasible=found.fits,
        layers=dict(found.placement.layers),
        recompute=_recomputed(found.placement),
        note="" if found.fits else "does not fit the memory",
    )


def alternative_of(
    layout: Layout,
    placement: ModulePlacement,
    memory: Sequence[RankMemory],
    step_us: float,
    lower_bound_us: float | None,
) -> Alternative:
    """Return the record of a plan that lost; ``memory`` and ``step_us`` cover the whole step, as those of a plan do."""
    rows = {name: {kind: row for kind, row in kinds.items() if any(row)} for name, kinds in placement.recompute.items()}
    return Alternative(
        layout=layout,
        step_us=step_us,
        lower_bound_us=lower_bound_us,
        layers=dict(placement.layers),
        recompute=_recomputed(placement),
        peak_bytes=max(rank.peak_bytes for rank in memory),
        recompute_kinds={name: kinds for name, kinds in rows.items() if kinds},
        prediction_stage=placement.prediction_stage,
    )


def _alternative(candidate: Candidate, result: LayoutResult) -> Alternative:
    found = result.evaluation
    assert found is not None
    return alternative_of(candidate.layout, found.placement, found.memory, found.step_us, result.lower_bound_us)


def _recomputed(placement: ModulePlacement) -> dict[str, tuple[int, ...]]:
    return {name: placement.recomputed(name) for name in placement.layers}
