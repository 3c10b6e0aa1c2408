"""Hetero and homogeneous plans for data with samples of unequal size, each the best of its kind by drawn steps.

The hetero search fits microbatches that are all slightly larger than the largest one, with the times of the mean one.
Its best plans are priced again at the mean sample and drawn.

Steps are drawn over global batches: encoder items on their owners, decoder samples in the pipeline. Before and after
its pipeline a backbone replica waits for the encoder replicas with which it exchanges: for the busiest owner of every
macro-batch. Formula X3 in docs/data.md.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy

from mindspeed_autoparallel.cost.redistribution import exchange_of
from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.data.work import COLUMNS, ModuleWork, WorkModel
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.best_first import Progress, silent
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.hetero.backbone import backbone_plan, backbone_profile
from mindspeed_autoparallel.planner.hetero.compare import Comparison, best_of_both
from mindspeed_autoparallel.planner.hetero.encoders import encoder_phase
from mindspeed_autoparallel.planner.hetero.space import costs_of
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.rank_memory import point_of
from mindspeed_autoparallel.planner.spread.choose import Search
from mindspeed_autoparallel.planner.spread.drawn_steps import DrawnSteps, PlanUnderData
from mindspeed_autoparallel.planner.spread.draws import Array
from mindspeed_autoparallel.planner.spread.factors import SampleFactors, sample_factors
from mindspeed_autoparallel.planner.spread.interrupted import choose_until_interrupted
from mindspeed_autoparallel.planner.spread.memory import OutOfMemory
from mindspeed_autoparallel.planner.spread.others import in_whole_search, other_layouts
from mindspeed_autoparallel.planner.spread.samples import Judged, Samples, SpreadOptions
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Layout, Plan
from mindspeed_autoparallel.spec.hetero import WINDOW, EncoderPhase, HeteroRecord

_IMAGES = COLUMNS.index("images")


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    """One encoder's phase: the replicas that share its items, and the time of a unit of work."""

    work: ModuleWork
    scale: int
    """Microbatches per macro-batch."""
    backbone_replicas: int
    """Number of backbone replicas that exchange with each other."""
    owners: int
    unit_us: float
    """Forward and backward time of a sample, with the profile's sample as unit."""


class HeteroPlanUnderData(PlanUnderData):
    """A hetero plan of ``profile`` with the time factors ``factors`` of a sample's modules."""

    def __init__(self, profile: Profile, plan: Plan, factors: SampleFactors, mean_times: Array) -> None:
        """Take the mean time factors ``[module]`` for which ``plan`` was made.

        Raise ``ConfigError`` for memory mode window, in which encoders run inside the pipeline.
        """
        record = plan.hetero
        assert record is not None
        if record.memory == WINDOW:
            raise ConfigError("steps of unequal samples are not modelled for encoders that run inside the pipeline.")
        names = [module.name for module in profile.model.modules]
        own = {phase.module for phase in record.encoders}
        kept = [index for index, name in enumerate(names) if name not in own]
        super().__init__(backbone_profile(profile), backbone_plan(plan), _only(factors, kept))
        constant = plan.step.total_us - plan.step.pipeline_us
        self._rest_us = constant - sum(phase.forward_us + phase.backward_us for phase in record.encoders)
        self._encoders = [
            _encoder(plan, phase, work, float(mean_times[index]))
            for phase in record.encoders
            if (work := factors.work[(index := names.index(phase.module))]) is not None
        ]

    def work(self) -> WorkModel:
        """Return the work of a sample: the pipeline's modules are one phase, and every encoder is a phase
        of its own."""
        pipeline = super().work().phases
        # Nanoseconds of all stages, which work in parallel.
        beside = 1e-3 / self.layout.pipeline_size
        encoders = ((_scaled(one.work, one.unit_us * one.backbone_replicas / one.owners),) for one in self._encoders)
        return WorkModel(phases=(*(tuple(_scaled(work, beside) for work in phase) for phase in pipeline), *encoders))

    def _replicas_us(self, sizes: Array) -> Array:
        """Return step times ``[step, replica]``: each pipeline, and the encoder phases for which it waits."""
        found = super()._replicas_us(sizes)
        for encoder in self._encoders:
            for group in range(0, sizes.shape[1], encoder.backbone_replicas):
                replicas = slice(group, group + encoder.backbone_replicas)
                busiest = [_busiest(encoder, step[replicas]) for step in sizes]
                found[:, replicas] += encoder.unit_us * numpy.array(busiest)[:, None]
        return found


def _busiest(encoder: _Encoder, sizes: Array) -> float:
    """Return the work of the busiest owner of every macro-batch, in samples of the profile.

    ``sizes [replica, microbatch, sample, column]``: one step of the replicas that share owners.
    """
    total = 0.0
    for first in range(0, sizes.shape[1], encoder.scale):
        samples = sizes[:, first : first + encoder.scale].reshape(-1, sizes.shape[3])
        work, count = encoder.work.of(samples), numpy.maximum(samples[:, _IMAGES], 1)
        loads = [0.0] * encoder.owners
        for item in sorted(numpy.repeat(work / count, count).tolist(), reverse=True):
            heapq.heapreplace(loads, loads[0] + item)
        total += max(loads)
    return total


def _encoder(plan: Plan, phase: EncoderPhase, work: ModuleWork, mean_time: float) -> _Encoder:
    assert plan.hetero is not None
    backbone = replace(plan.layout, modules={})
    exchange = exchange_of(backbone, phase.layout, plan.hetero.balance)
    scale, number = phase.layout.micro_batch_scale, plan.num_microbatches
    windows = [min(scale, number - first) for first in range(0, number, scale)]
    samples = sum(exchange.samples_of_busiest(window * backbone.micro_batch_size) for window in windows)
    return _Encoder(
        work=work,
        scale=scale,
        backbone_replicas=exchange.backbone_replicas,
        owners=exchange.encoder_replicas,
        unit_us=(phase.forward_us + phase.backward_us) / (samples * mean_time) if mean_time else 0.0,
    )


def _only(factors: SampleFactors, kept: list[int]) -> SampleFactors:
    return replace(
        factors,
        work=tuple(factors.work[index] for index in kept),
        reference_rows=tuple(factors.reference_rows[index] for index in kept),
    )


def _scaled(work: ModuleWork, factor: float) -> ModuleWork:
    return replace(work, fixed=work.fixed * factor, linear=work.linear * factor, quadratic=work.quadratic * factor)


SearchHetero = Callable[[Profile, "list[Layout] | None"], Plan]
"""Searches a profile, over all layouts of the backbone or only the given ones; without memory mode window."""
MEMORY_NOTE = (
    "no probability is given: planned for microbatches that are all 1.2 times the largest, with equally many samples "
    "on every replica of an encoder"
)


def compare_by_data(
    profile: Profile,
    data: Distribution,
    options: SpreadOptions,
    search: Search,
    search_hetero: SearchHetero,
    until: float = math.inf,
    progress: Progress = silent,
) -> Comparison:
    """Return the best plan of either kind by drawn steps. Raises as ``best_of_both`` does.

    ``until``, ``progress``: those of ``choose_plan``.
    """
    return best_of_both(
        profile,
        partial(choose_until_interrupted, profile, data, options, search, until, progress),
        partial(choose_hetero, profile, data, options, search_hetero),
    )


def choose_hetero(profile: Profile, data: Distribution, options: SpreadOptions, search: SearchHetero) -> Plan:
    """Return the hetero plan with the smallest mean drawn step, among the best one and its alternatives."""
    samples = Samples(
        profile=profile, data=data, factors=sample_factors(profile, data, options.padding), options=options
    )
    at_mean, largest = samples.mean_profile(), samples.mean_profile(1.0)
    best = search(largest, None)
    backbones = [replace(other.layout, modules={}) for other in best.alternatives]
    plans = [best, *(search(largest, [layout]) for layout in backbones)]
    judged = [_judged(samples, _at_mean(at_mean, plan)) for plan in plans]
    judged.sort(key=lambda one: one.mean_us)
    packed = _drawn(replace(samples, factors=sample_factors(profile, data, "none")), judged[0].plan)
    others = other_layouts(judged[0].plan, ((one.mean_us, one.plan) for one in judged), options.top_k)
    chosen = replace(judged[0].plan, alternatives=others, data=samples.record(judged[0], judged, packed, MEMORY_NOTE))
    return in_whole_search(chosen, best)


def _judged(samples: Samples, plan: Plan) -> Judged:
    """Return the drawn steps of a plan; its probability of running out of memory is unknown."""
    worst = max(plan.memory, key=lambda rank: rank.peak_bytes - rank.limit_bytes)
    memory = OutOfMemory(
        probability=1.0,
        num_steps=samples.options.oom_steps,
        pipeline_rank=worst.pipeline_rank,
        worst_bytes=worst.peak_bytes,
        limit_bytes=worst.limit_bytes,
    )
    return Judged(plan=plan, drawn=_drawn(samples, plan), options=samples.options, memory=memory)


def _drawn(samples: Samples, plan: Plan) -> DrawnSteps:
    times, _ = samples.factors.mean(samples.data, plan.layout.micro_batch_size)
    return HeteroPlanUnderData(samples.profile, plan, samples.factors, times).drawn(samples.data)


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
    candidate = Candidate(
        profile=backbone,
        cluster=plan.cluster,
        layout=layout,
        measurement=measurement,
        num_microbatches=plan.num_microbatches,
    )
    phases = tuple(_phase_at_mean(profile, plan, record, phase, candidate) for phase in record.encoders)
    # Steps between the two kinds of plans are those of the largest samples.
    again = replace(record, encoders=phases, scale_one_us=None, kept_us=None, scale_one_again_us=None)
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
    mean = encoder_phase(own[0], sizes, candidate, memory=record.memory, balance=record.balance)
    return replace(
        mean,
        state_bytes=phase.state_bytes,
        kept_bytes=phase.kept_bytes,
        transient_bytes=phase.transient_bytes,
        first_stage_bytes=phase.first_stage_bytes,
        stage_memory=phase.stage_memory,
    )
