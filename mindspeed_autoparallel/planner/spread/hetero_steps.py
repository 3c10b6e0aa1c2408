"""Steps of a hetero plan over drawn global batches: encoder items on their owners, decoder samples in the pipeline.

Before and after its pipeline a backbone replica waits for the encoder replicas with which it exchanges: for the busiest
owner of every macro-batch. Formula X3 in docs/data.md.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy

from mindspeed_autoparallel.cost.redistribution import exchange_of
from mindspeed_autoparallel.data.sample import COLUMNS
from mindspeed_autoparallel.data.work import ModuleWork, WorkModel
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.hetero.backbone import backbone_plan, backbone_profile
from mindspeed_autoparallel.planner.spread.drawn_steps import PlanUnderData
from mindspeed_autoparallel.planner.spread.draws import Array
from mindspeed_autoparallel.planner.spread.factors import SampleFactors
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.spec.hetero import EncoderPhase

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
        if record.memory == "window":
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
