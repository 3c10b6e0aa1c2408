"""Hetero and homogeneous plans for data with samples of unequal size, each the best of its kind by drawn steps.

The hetero search fits microbatches that are all slightly larger than the largest one, with the times of the mean one.
Its best plans are priced again at the mean sample and drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.hetero.backbone import backbone_plan, backbone_profile
from mindspeed_autoparallel.planner.hetero.compare import Comparison, best_of_both
from mindspeed_autoparallel.planner.hetero.encoders import encoder_phase
from mindspeed_autoparallel.planner.hetero.space import costs_of
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.rank_memory import point_of
from mindspeed_autoparallel.planner.spread.choose import Judged, Search, SpreadOptions, choose_plan, data_record
from mindspeed_autoparallel.planner.spread.drawn_steps import DrawnSteps
from mindspeed_autoparallel.planner.spread.factors import SampleFactors, sample_factors
from mindspeed_autoparallel.planner.spread.hetero_steps import HeteroPlanUnderData
from mindspeed_autoparallel.planner.spread.memory import OutOfMemory
from mindspeed_autoparallel.planner.spread.scaled import mean_profile
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Layout, Plan
from mindspeed_autoparallel.spec.hetero import EncoderPhase, HeteroRecord

SearchHetero = Callable[[Profile, "list[Layout] | None"], Plan]
"""Searches a profile, over all layouts of the backbone or only the given ones; without memory mode window."""
MEMORY_NOTE = (
    "no probability is given: planned for microbatches that are all 1.2 times the largest, with equally many samples "
    "on every replica of an encoder"
)


def compare_by_data(
    profile: Profile, data: Distribution, options: SpreadOptions, search: Search, search_hetero: SearchHetero
) -> Comparison:
    """Return the best plan of either kind by drawn steps. Raises the errors of ``compare``."""
    return best_of_both(
        profile,
        partial(choose_plan, profile, data, options, search),
        partial(choose_hetero, profile, data, options, search_hetero),
    )


def choose_hetero(profile: Profile, data: Distribution, options: SpreadOptions, search: SearchHetero) -> Plan:
    """Return the hetero plan with the smallest mean drawn step, among the best one and its alternatives."""
    factors = sample_factors(profile, data, options.padding)
    at_mean, largest = (mean_profile(profile, data, factors, share) for share in (0.0, 1.0))
    best = search(largest, None)
    backbones = [replace(other.layout, modules={}) for other in best.alternatives]
    plans = [best, *(search(largest, [layout]) for layout in backbones)]
    judged = [_judged(profile, _at_mean(at_mean, plan), data, factors, options) for plan in plans]
    judged.sort(key=lambda one: one.mean_us)
    packed = _drawn(profile, judged[0].plan, data, sample_factors(profile, data, "none"))
    record = data_record(judged[0], judged, packed, data, factors, options, MEMORY_NOTE)
    return replace(judged[0].plan, data=record)


def _judged(profile: Profile, plan: Plan, data: Distribution, factors: SampleFactors, options: SpreadOptions) -> Judged:
    """Return the drawn steps of a plan; its probability of running out of memory is unknown."""
    worst = max(plan.memory, key=lambda rank: rank.peak_bytes - rank.limit_bytes)
    memory = OutOfMemory(
        probability=1.0,
        num_steps=options.oom_steps,
        pipeline_rank=worst.pipeline_rank,
        worst_bytes=worst.peak_bytes,
        limit_bytes=worst.limit_bytes,
    )
    drawn = _drawn(profile, plan, data, factors)
    return Judged(plan=plan, drawn=drawn, is_balanced=options.is_balanced, memory=memory)


def _drawn(profile: Profile, plan: Plan, data: Distribution, factors: SampleFactors) -> DrawnSteps:
    times, _ = factors.mean(data, plan.layout.micro_batch_size)
    return HeteroPlanUnderData(profile, plan, factors, times).drawn(data)


def _at_mean(profile: Profile, plan: Plan) -> Plan:
    """Return ``plan`` with step and encoder phases of ``profile``, that of the mean sample, and its memory
    unchanged."""
    record = plan.hetero
    assert record is not None
    inner = backbone_plan(plan)
    backbone, layout = backbone_profile(profile), inner.layout
    found = evaluate(backbone, plan.cluster, layout, ModulePlacement.of_plan(inner), plan.global_batch_size)
    measurement = point_of(backbone, layout)
    assert measurement is not None  # it was planned
    candidate = Candidate(layout=layout, measurement=measurement, num_microbatches=plan.num_microbatches)
    phases = tuple(_phase_at_mean(profile, plan, record, phase, candidate) for phase in record.encoders)
    again = replace(record, encoders=phases)
    step = replace(found.step, total_us=found.step.total_us + again.total_us)
    return replace(plan, hetero=again, step=step, extra=replace(plan.extra, link_us=found.link_us))


def _phase_at_mean(
    profile: Profile, plan: Plan, record: HeteroRecord, phase: EncoderPhase, candidate: Candidate
) -> EncoderPhase:
    """Return the phase with the times of ``profile`` and its planned bytes."""
    module = next(module for module in profile.model.modules if module.name == phase.module)
    sizes = phase.layout
    costs, _ = costs_of(profile, module, plan.cluster, [sizes.tensor_size], (sizes.pipeline_size,))
    own = [one for one in costs if one.point.context_size == sizes.context_size]
    if not own:
        raise ConfigError(f"{phase.module} has no costs at TP{sizes.tensor_size} CP{sizes.context_size}.")
    mean = encoder_phase(own[0], sizes, candidate, plan.cluster, memory=record.memory, balance=record.balance)
    return replace(
        mean,
        state_bytes=phase.state_bytes,
        kept_bytes=phase.kept_bytes,
        transient_bytes=phase.transient_bytes,
        first_stage_bytes=phase.first_stage_bytes,
        stage_memory=phase.stage_memory,
    )
