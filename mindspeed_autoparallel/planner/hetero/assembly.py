"""The plan file of the winner of a hetero search: the backbone's plan with the encoders' phases added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.planner.evaluate import evaluated
from mindspeed_autoparallel.planner.hetero.backbone import BackboneSolver, Reserved, beside, outside_pipeline_bytes
from mindspeed_autoparallel.planner.layouts.assembly import alternative_of, assemble_plan, limits_of
from mindspeed_autoparallel.planner.layouts.layout_solver import LayoutResult
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Layout, Plan
from mindspeed_autoparallel.spec.hetero import WINDOW, HeteroRecord
from mindspeed_autoparallel.spec.plan_records import Alternative, RankMemory, SearchRecord


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A choice of all layouts with the backbone's split."""

    solver: BackboneSolver
    record: HeteroRecord
    result: LayoutResult
    step_us: float
    lower_bound_us: float

    @property
    def reserved(self) -> Reserved:
        """Return the memory that the encoders hold while the pipeline runs."""
        return reserved_by(self.record)

    @property
    def layout(self) -> Layout:
        """Return the backbone's layout with the encoders' own."""
        return with_modules(self.solver.candidate.layout, self.record)


def reserved_by(record: HeteroRecord) -> Reserved:
    """Return the memory that the encoders of ``record`` hold while the pipeline runs."""
    return Reserved(everywhere_bytes=record.reserved_bytes, first_stage_bytes=record.first_stage_bytes)


def with_modules(layout: Layout, record: HeteroRecord) -> Layout:
    """Return the backbone's layout with the encoders' own."""
    return replace(layout, modules={phase.module: phase.layout for phase in record.encoders})


def assemble(profile: Profile, best: Solved, others: Sequence[Solved], record: SearchRecord) -> Plan:
    """Return the complete ``plan.json``."""
    solver = best.solver
    candidate = beside(solver.candidate, best.reserved)
    assert candidate is not None, "it was solved"
    cluster = solver.candidate.cluster
    inner = assemble_plan(candidate, best.result, [], record)
    notes = [
        f"{phase.module} with {phase.samples} samples is interpolated from {', '.join(phase.interpolated_from)}."
        for phase in best.record.encoders
        if phase.interpolated_from
    ]
    if best.record.memory == WINDOW:
        notes.append(
            "Memory mode window was evaluated on splits found for other modes only; its bound is the pipeline's."
        )
    inner = replace(
        inner,
        model=profile.model,
        cluster=cluster,
        hetero=best.record,
        layout=best.layout,
        alternatives=tuple(_alternative(found, solver.candidate.limit_bytes) for found in others),
        profile=replace(inner.profile, sha256=profile.sha256(), notes=(*inner.profile.notes, *notes)),
    )
    return with_encoders(inner, solver.candidate.limit_bytes)


def with_encoders(inner: Plan, limit_bytes: int) -> Plan:
    """Return ``inner``, whose step, baselines and memory cover the pipeline only (``hetero`` is set), with those of the
    whole step."""
    record = inner.hetero
    assert record is not None
    step_us = inner.step.total_us + record.total_us
    throughput = inner.throughput_tokens_per_s_per_device * (inner.step.total_us / step_us if step_us else 1.0)
    plan = replace(
        inner,
        throughput_tokens_per_s_per_device=throughput,
        step=replace(
            inner.step,
            total_us=step_us,
            p50_us=None if inner.step.p50_us is None else inner.step.p50_us + record.total_us,
            p95_us=None if inner.step.p95_us is None else inner.step.p95_us + record.total_us,
        ),
        memory=tuple(_memory(rank, record, inner.layout.pipeline_size, limit_bytes) for rank in inner.memory),
        baselines=tuple(
            replace(base, step_us=None if base.step_us is None else base.step_us + record.total_us)
            for base in inner.baselines
        ),
    )
    return replace(plan, search=replace(plan.search, limits=limits_of_hetero(plan)))


def _memory(rank: RankMemory, record: HeteroRecord, num_stages: int, limit_bytes: int) -> RankMemory:
    """Return the peak with what encoders hold, or that of an encoder before or after the pipeline if it is higher."""
    at_first = record.first_stage_bytes if rank.pipeline_rank == 0 else 0
    own = record.memory_on(rank.pipeline_rank, num_stages)
    reserved_bytes = own.state_bytes + own.kept_bytes
    held = {"encoder_state": own.state_bytes, "encoder_activations": own.kept_bytes, "encoder_outputs": at_first}
    terms = dict(rank.terms)
    if at_first:
        # The pipeline's problem counts it as state of the first block, or as a lower limit.
        terms["optimizer"] = max(0, terms.get("optimizer", 0) - at_first)
    outside = outside_pipeline_bytes(rank.terms, Reserved(everywhere_bytes=reserved_bytes), own.transient_bytes)
    peak, point = rank.peak_bytes + reserved_bytes, rank.peak_point
    if outside > peak:
        peak, point = outside, "an encoder, outside the pipeline"
        state = ("parameters", "gradients", "optimizer", "runtime_overhead")
        terms = {name: terms[name] for name in state if name in terms}
        held["transient"] = own.transient_bytes
    return replace(rank, peak_bytes=peak, limit_bytes=limit_bytes, peak_point=point, terms={**terms, **held})


def limits_of_hetero(plan: Plan) -> tuple[str, ...]:
    """Return the plan's bottlenecks by share of the step, then the rank nearest to its memory limit."""
    record, step = plan.hetero, plan.step
    assert record is not None
    busiest = max(plan.stages, key=lambda stage: stage.forward_us + stage.backward_us)
    parts = [
        (step.pipeline_us * (1 - step.bubble_fraction), f"time of stage {busiest.stage}, the busiest of the backbone"),
        (step.pipeline_us * step.bubble_fraction, "bubble of the backbone's pipeline"),
        (step.data_parallel_us, "gradient reduction of the backbone"),
        (step.optimizer_us, "optimizer step of the backbone"),
        (step.embedding_us, "all-reduce of tied embeddings"),
    ]
    for phase in record.encoders:
        parts += [
            (
                phase.forward_us + phase.backward_us,
                f"time of {phase.module} {'between passes of' if phase.generator else 'outside'} the pipeline",
            ),
            (phase.exchange_us, f"redistribution between {phase.module} and the backbone"),
            (phase.reduction_us + phase.optimizer_us, f"gradient reduction and optimizer of {phase.module}"),
        ]
    return limits_of(parts, step.total_us, plan.memory)


def _alternative(found: Solved, limit_bytes: int) -> Alternative:
    # The split may have been found beside encoders that hold less.
    candidate = beside(found.solver.candidate, found.reserved)
    assert candidate is not None, "it was solved"
    assert found.result.evaluation is not None
    placement = found.result.evaluation.placement
    ranks = evaluated(candidate, placement).memory
    memory = [_memory(rank, found.record, candidate.layout.pipeline_size, limit_bytes) for rank in ranks]
    return alternative_of(found.layout, placement, memory, found.step_us, found.lower_bound_us)
