"""Steps of a plan over drawn global batches: an exact simulation of every replica with its own microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy

from mindspeed_autoparallel.data.balance import BatchShape, balance
from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.data.work import WorkModel
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.placement import ModulePlacement, placed_blocks
from mindspeed_autoparallel.planner.rank_memory import point_of, sends_of
from mindspeed_autoparallel.planner.spread.draws import Array, draw_batches
from mindspeed_autoparallel.planner.spread.factors import SampleFactors
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, beside_blocks_ns, block_times_ns
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.schedule import BatchSimulator, make_program
from mindspeed_autoparallel.spec import Layout, Plan

NUM_DRAWS = 64
SEED = 20260601


@dataclass(frozen=True, kw_only=True)
class DrawnSteps:
    """Step times in microseconds over the same drawn batches."""

    in_order: Array
    """Steps with samples on replicas in the order in which they are drawn."""
    balanced: Array
    """Steps with batches rearranged by ``data.balance``."""
    imbalance: float
    """Work of the slowest replica over the mean replica's, in order; mean over the steps."""


class StepsUnderData:
    """Steps of a layout under samples of unequal size.

    Stages take ``times [pass, virtual stage, module]`` nanoseconds for the profile's sample, and ``factors`` times that
    for another sample.
    """

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        layout: Layout,
        times: Array,
        factors: SampleFactors,
        link_us: Sequence[float],
    ) -> None:
        """Raise ``ConfigError`` for layouts whose steps are not modelled: sharded states, pairs, encoders of their own.

        ``plan`` has the same batch and possibly another layout; ``link_us`` are the messages between virtual stages.
        """
        if layout.sharding is not None or layout.paired or layout.modules:
            raise ConfigError(f"{layout.label()}: steps of unequal samples are not modelled for this layout.")
        self.layout, self.factors, self._times = layout, factors, times
        self.global_batch_size = plan.global_batch_size
        number = plan.global_batch_size // (layout.data_size * layout.micro_batch_size)
        program = make_program(*layout.program_sizes(number))
        message = round(profile.device.message_us(layout.schedule) * NS_PER_US)
        link = [round(size * NS_PER_US) + message for size in link_us]
        self._simulator = BatchSimulator(program, sends_of(profile, layout), link)
        self._beside: Array = numpy.array(beside_blocks_ns(profile.device, layout), dtype=numpy.float64)
        self._rest_us = 0.0

    @property
    def shape(self) -> BatchShape:
        """Return the shape of the global batch: replicas, microbatches, samples."""
        layout = self.layout
        return BatchShape(
            num_replicas=layout.data_size,
            num_microbatches=self.global_batch_size // (layout.data_size * layout.micro_batch_size),
            micro_batch_size=layout.micro_batch_size,
            is_padded=self.factors.padding == "longest",
            is_filled=self.factors.pack_length > 0,
            max_tokens=self.factors.pack_length,
        )

    def work(self) -> WorkModel:
        """Return the work of a sample: the time of all modules, in one phase."""
        totals = self._times.sum(axis=(0, 1))
        works = [
            replace(work, fixed=work.fixed * total, linear=work.linear * total, quadratic=work.quadratic * total)
            for work, total in zip(self.factors.work, totals.tolist(), strict=True)
            if work is not None and total > 0
        ]
        return WorkModel(phases=(tuple(works),))

    def step_us(self, sizes: Array) -> float:
        """Return the step time of one global batch ``sizes [replica, microbatch, sample, column]``: the slowest
        replica's."""
        return float(self._steps_us(sizes[None])[0])

    def step_of_factors_us(self, times: Array) -> float:
        """Return the step time if all microbatches have the time factors ``times [module]``."""
        of_module: Array = numpy.repeat(times[None, None, :], self.shape.num_microbatches, axis=1)
        return float(self._pipelines_ns(of_module)[0]) / NS_PER_US + self._rest_us

    def drawn(self, data: Distribution, num_draws: int = NUM_DRAWS, seed: int = SEED) -> DrawnSteps:
        """Draw global batches, the same for every plan with this batch size, and return their steps."""
        sizes, shape, work = data.sizes(), self.shape, self.work()
        rows = draw_batches(data, self.factors.weight(sizes), num_draws, self.global_batch_size, seed)
        cut = (shape.num_microbatches, shape.num_replicas, shape.micro_batch_size)
        in_order = rows.reshape(num_draws, *cut).swapaxes(1, 2)
        nothing = len(sizes)
        sizes = numpy.concatenate((sizes, numpy.zeros_like(sizes[:1])))
        shared: list[Array] = [numpy.append(drawn, nothing)[balance(sizes[drawn], work, shape)] for drawn in rows]
        places = max(one.shape[2] for one in shared)
        shared = [
            numpy.pad(one, ((0, 0), (0, 0), (0, places - one.shape[2])), constant_values=nothing) for one in shared
        ]
        loads = work.of(sizes).sum(axis=1)[in_order].sum(axis=(2, 3))
        return DrawnSteps(
            in_order=self._steps_us(sizes[in_order]),
            balanced=self._steps_us(sizes[numpy.stack(shared)]),
            imbalance=float((loads.max(axis=1) / loads.mean(axis=1)).mean()),
        )

    def _steps_us(self, sizes: Array) -> Array:
        """Return step times ``[step]`` for ``sizes [step, replica, microbatch, sample, column]``: the slowest
        replica's."""
        slowest: Array = self._replicas_us(sizes).max(axis=1) + self._rest_us
        return slowest

    def _replicas_us(self, sizes: Array) -> Array:
        """Return step times ``[step, replica]`` for ``sizes [step, replica, microbatch, sample, column]``."""
        steps, replicas, microbatches = sizes.shape[:3]
        samples = sizes.reshape(-1, *sizes.shape[3:])
        times = self.factors.of_packs(samples, self.layout.micro_batch_size)
        found = self._pipelines_ns(times.reshape(steps * replicas, microbatches, -1))
        return found.reshape(steps, replicas) / NS_PER_US

    def _pipelines_ns(self, of_module: Array) -> Array:
        """Return pipeline times ``[pipeline]`` for time factors ``[pipeline, microbatch, module]``."""
        forward, backward = (
            numpy.einsum("cmj,vj->cvm", of_module, one) + self._beside[None, :, None] for one in self._times
        )
        return self._simulator.step_times(forward, backward)


class PlanUnderData(StepsUnderData):
    """Steps of one plan of ``profile`` with the time factors ``factors`` of a sample's modules."""

    def __init__(self, profile: Profile, plan: Plan, factors: SampleFactors) -> None:
        """Raise ``ConfigError`` for layouts whose steps are not modelled: sharded states, pairs, encoders
        of their own."""
        layout = plan.layout
        measurement = point_of(profile, layout)
        assert measurement is not None  # it was planned
        blocks = placed_blocks(profile.model, measurement, ModulePlacement.of_plan(plan))
        names = [module.name for module in profile.model.modules]
        times: Array = numpy.zeros((2, len(blocks), len(names)))
        for v, held in enumerate(blocks):
            for block in held:
                times[:, v, names.index(block.module)] += block_times_ns(block.cost, kind=block.kind)
        super().__init__(profile, plan, layout, times, factors, plan.extra.link_us)
        # Gradient reduction, optimizer and messages are those of the mean sample.
        self._rest_us = plan.step.total_us - plan.step.pipeline_us
