"""Steps of a plan over drawn global batches: every replica by exact simulation of its own microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy

from mindspeed_autoparallel.data.balance import BatchShape, balance
from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.data.work import WorkModel
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.placement import ModulePlacement, placed_blocks
from mindspeed_autoparallel.planner.rank_memory import point_of, sends_of
from mindspeed_autoparallel.planner.spread.draws import draw_batches
from mindspeed_autoparallel.planner.spread.factors import SampleFactors
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, beside_blocks_ns, block_times_ns
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.schedule import BatchSimulator, make_program
from mindspeed_autoparallel.spec import Plan

Array = Any
"""A numpy array."""
NUM_DRAWS = 64
_SEED = 20260601


@dataclass(frozen=True, kw_only=True)
class DrawnSteps:
    """Step times in microseconds over the same drawn batches."""

    in_order: Array
    """Samples lie on replicas as they are drawn."""
    balanced: Array
    """Rearranged by ``data.balance``."""
    imbalance: float
    """Mean over the steps: work of the slowest replica over that of the mean one, in order."""


class PlanUnderData:
    """One plan of ``profile``, whose modules take ``factors`` times their time for a sample."""

    def __init__(self, profile: Profile, plan: Plan, factors: SampleFactors) -> None:
        """Raise ``ConfigError`` for layouts whose steps are not drawn: sharded states, pairs, encoders of their own."""
        layout = plan.layout
        if layout.sharding is not None or layout.paired or layout.modules:
            raise ConfigError(f"{layout.label()}: steps of unequal samples are not modelled for this layout.")
        self.plan, self.factors = plan, factors
        measurement = point_of(profile, layout)
        assert measurement is not None  # it was planned
        placement = ModulePlacement.of_plan(plan)
        blocks = placed_blocks(profile.model, measurement, placement)
        names = [module.name for module in profile.model.modules]
        self._times: Array = numpy.zeros((2, len(blocks), len(names)))
        for v, held in enumerate(blocks):
            for block in held:
                self._times[:, v, names.index(block.module)] += block_times_ns(block)
        # Gradient reduction, optimizer and messages are those of the mean sample.
        self._rest_us = plan.step.total_us - plan.step.pipeline_us
        program = make_program(layout.schedule, layout.pipeline_size, plan.num_microbatches, layout.virtual_size)
        message = round(profile.device.message_us(layout.schedule) * NS_PER_US)
        link = [round(size * NS_PER_US) + message for size in plan.extra.link_us]
        self._simulator = BatchSimulator(program, sends_of(profile, layout), link)
        self._beside: Array = numpy.array(beside_blocks_ns(profile.device, layout), dtype=numpy.float64)

    @property
    def shape(self) -> BatchShape:
        """Return the global batch: replicas, microbatches, samples."""
        layout = self.plan.layout
        return BatchShape(
            num_replicas=layout.data_size,
            num_microbatches=self.plan.num_microbatches,
            micro_batch_size=layout.micro_batch_size,
            is_padded=self.factors.padding == "longest",
        )

    def work(self) -> WorkModel:
        """Return the work of a sample: the time of all modules, one phase."""
        totals = self._times.sum(axis=(0, 1))
        works = [
            replace(work, fixed=work.fixed * total, linear=work.linear * total, quadratic=work.quadratic * total)
            for work, total in zip(self.factors.work, totals.tolist(), strict=True)
            if work is not None and total > 0
        ]
        return WorkModel(phases=(tuple(works),))

    def step_us(self, sizes: Array) -> float:
        """Return the step of one global batch ``sizes [replica, microbatch, sample, column]``: the slowest replica."""
        return float(self._steps_us(sizes[None])[0])

    def drawn(self, data: Distribution, num_draws: int = NUM_DRAWS) -> DrawnSteps:
        """Draw global batches, the same for every plan of one batch size, and return their steps."""
        sizes, shape, work = data.sizes(), self.shape, self.work()
        rows = draw_batches(data, self.factors.weight(sizes), num_draws, self.plan.global_batch_size, _SEED)
        cut = (shape.num_microbatches, shape.num_replicas, shape.micro_batch_size)
        in_order = rows.reshape(num_draws, *cut).swapaxes(1, 2)
        shared = [drawn[balance(sizes[drawn], work, shape).samples] for drawn in rows]
        loads = work.of(sizes)[:, 0][in_order].sum(axis=(2, 3))
        return DrawnSteps(
            in_order=self._steps_us(sizes[in_order]),
            balanced=self._steps_us(sizes[numpy.stack(shared)]),
            imbalance=float((loads.max(axis=1) / loads.mean(axis=1)).mean()),
        )

    def _steps_us(self, sizes: Array) -> Array:
        """Return ``[step]`` for ``sizes [step, replica, microbatch, sample, column]``."""
        steps, replicas, microbatches = sizes.shape[:3]
        times, _ = self.factors.of(sizes.reshape(-1, *sizes.shape[3:]))
        of_module = times.reshape(steps * replicas, microbatches, -1)
        forward, backward = (
            numpy.einsum("cmj,vj->cvm", of_module, one) + self._beside[None, :, None] for one in self._times
        )
        found = self._simulator.step_times_of_microbatches(forward, backward)
        slowest: Array = found.reshape(steps, replicas).max(axis=1) / NS_PER_US + self._rest_us
        return slowest
