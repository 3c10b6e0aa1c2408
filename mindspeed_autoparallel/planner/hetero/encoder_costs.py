"""The cost of one encoder at one (TP, CP) of the profile: batches of any size, whole or stage by stage."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from mindspeed_autoparallel.cost.memory import PlacedBlock, static_terms
from mindspeed_autoparallel.cost.step import PostPipelineTime, post_pipeline_time
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, block_ns, block_times_ns
from mindspeed_autoparallel.planner.variable_data import mean_factors
from mindspeed_autoparallel.profiles import BlockCost, MeasuredAt, Measurement, ModuleCost, Profile
from mindspeed_autoparallel.profiles.interpolation import interpolate
from mindspeed_autoparallel.spec import Cluster, Layout, Module


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One encoder batch of some samples on one rank: nanoseconds and bytes."""

    forward_ns: int
    backward_ns: int
    saved_bytes: int
    """Activations and the output, kept until the backward."""
    transient_bytes: int
    """Peak above the saved bytes, in forward or backward."""
    input_bytes: int
    """Bytes of the input data, on the first stage."""
    output_bytes: int
    """Bytes sent to the next stage, or to the backbone."""


class EncoderCosts:
    """One encoder, or generator, at one (TP, CP) of the profile; the profile interpolates along MBS for batches of any
    size."""

    def __init__(
        self,
        profile: Profile,
        module: Module,
        point: MeasuredAt,
        pipeline_sizes: tuple[int, ...] = (1,),
        *,
        generates: bool = False,
    ) -> None:
        """Take ``module`` of ``profile`` at ``point``. ``generates``: whether it follows the backbone."""
        self.profile, self.module, self.point = profile, module, point
        self.pipeline_sizes, self.generates = pipeline_sizes, generates
        self.factor = mean_factors(profile.variable_data).get(module.name, 1.0)
        self._own = [
            replace(measurement, modules={module.name: measurement.modules[module.name]})
            for measurement in profile.measurements
        ]
        self._measurements: dict[int, Measurement] = {}
        self._batches: dict[int, Batch] = {}
        self._staged: dict[tuple[int, int], tuple[Batch, ...]] = {}
        self._states: dict[tuple[int, int, bool], tuple[tuple[int, ...], PostPipelineTime]] = {}
        self._output_bytes_per_sample: float | None = None

    def measurement(self, samples: int) -> Measurement:
        """Return costs of a batch of ``samples``."""
        if samples not in self._measurements:
            at = replace(self.point, micro_batch_size=samples)
            measured = next((measurement for measurement in self._own if measurement.at == at), None)
            found = measured or interpolate(self._own, at)
            assert found is not None, "the profile has a measurement at this point"
            self._measurements[samples] = found
        return self._measurements[samples]

    def blocks(self) -> list[PlacedBlock]:
        """Return all blocks, for model state: it does not depend on the batch."""
        cost = self.measurement(self.point.micro_batch_size).modules[self.module.name]
        parts = cost.parts(self.module.num_layers)
        return [PlacedBlock(name="", cost=block) for _, block, count in parts for _ in range(count)]

    def output_bytes(self, samples: float) -> float:
        """Return the bytes that the backbone receives for ``samples``."""
        if self._output_bytes_per_sample is None:
            cost = self.measurement(self.point.micro_batch_size).modules[self.module.name]
            self._output_bytes_per_sample = (cost.post or cost.layer).output_bytes / self.point.micro_batch_size
        return self._output_bytes_per_sample * samples

    def rows_bytes(self, samples: float) -> float:
        """Return the bytes of decoder rows that a generator receives for ``samples``."""
        cost = self.measurement(self.point.micro_batch_size).modules[self.module.name]
        size = cost.rows_bytes or (cost.pre or cost.layer).output_bytes
        return size / self.point.micro_batch_size * samples

    @functools.cached_property
    def trained(self) -> bool:
        """Return whether any of its parameters is trained: otherwise there is no graph and no backward phase."""
        return any(block.cost.dense.gradient_bytes or block.cost.expert.gradient_bytes for block in self.blocks())

    def stage_layers(self, num_stages: int) -> tuple[int, ...]:
        """Return layers by stage of a pipeline: at least one each, every further one to the stage with the least
        time."""
        cost = self.measurement(self.point.micro_batch_size).modules[self.module.name]
        fixed = {0: cost.pre, num_stages - 1: cost.post} if num_stages > 1 else dict[int, BlockCost | None]()
        times = [block_ns(block) if (block := fixed.get(stage)) else 0 for stage in range(num_stages)]
        layer, counts = block_ns(cost.layer), [1] * num_stages
        for _ in range(self.module.num_layers - num_stages):
            counts[min(range(num_stages), key=lambda s: (times[s] + counts[s] * layer, s))] += 1
        return tuple(counts)

    def _stage_blocks(self, cost: ModuleCost, num_stages: int) -> list[list[tuple[BlockCost, int]]]:
        """Return each stage's blocks, and their numbers."""
        counts = self.stage_layers(num_stages)
        stages = [cost.runs(sum(counts[:stage]), count) for stage, count in enumerate(counts)]
        if cost.pre is not None:
            stages[0].insert(0, (cost.pre, 1))
        if cost.post is not None:
            stages[-1].append((cost.post, 1))
        return stages

    def state(self, layout: Layout, cluster: Cluster) -> tuple[tuple[int, ...], PostPipelineTime]:
        """Return bytes of parameters, gradients and optimizer by stage, and the optimizer step time of the slowest
        stage, for one cluster."""
        key = layout.pipeline_size, layout.data_size, layout.distributed_optimizer
        if key not in self._states:
            cost = self.measurement(self.point.micro_batch_size).modules[self.module.name]
            stages = [
                [PlacedBlock(name="", cost=block) for block, count in blocks for _ in range(count)]
                for blocks in self._stage_blocks(cost, layout.pipeline_size)
            ]
            tails = [post_pipeline_time(blocks, layout, cluster, self.profile.device) for blocks in stages]
            sizes = tuple(sum(static_terms(blocks, layout).values()) for blocks in stages)
            self._states[key] = sizes, max(tails, key=lambda tail: tail.total_us)
        return self._states[key]

    def batch(self, samples: int) -> Batch:
        """Return costs of a batch of ``samples``, without recomputation."""
        if samples not in self._batches:
            (self._batches[samples],) = self.staged(samples, 1)
        return self._batches[samples]

    def staged(self, samples: int, num_stages: int) -> tuple[Batch, ...]:
        """Return costs of a batch of ``samples`` on every stage of the encoder's pipeline."""
        key = samples, num_stages
        if key not in self._staged:
            self._staged[key] = self._stages(samples, num_stages)
        return self._staged[key]

    def _stages(self, samples: int, num_stages: int) -> tuple[Batch, ...]:
        measurement = self.measurement(samples)
        cost = measurement.modules[self.module.name]
        overhead = round(self.profile.device.operation_overhead_us * NS_PER_US)
        stages: list[Batch] = []
        for stage, blocks in enumerate(self._stage_blocks(cost, num_stages)):
            forward = backward = saved = transient = 0
            for block, count in blocks:
                times = block_times_ns(block, self.factor)
                forward, backward = forward + count * times[0], backward + count * times[1]
                plain = block.recompute["none"]
                saved += count * plain.saved_bytes
                transient = max(transient, plain.forward_peak_bytes, plain.backward_peak_bytes)
            stages.append(
                Batch(
                    forward_ns=forward + overhead,
                    backward_ns=backward + overhead if backward else 0,
                    saved_bytes=saved + cost.side.kept_bytes + blocks[-1][0].output_bytes,
                    transient_bytes=transient,
                    input_bytes=(cost.input_bytes or measurement.batch.kept_bytes) if stage == 0 else 0,
                    output_bytes=blocks[-1][0].output_bytes,
                )
            )
        return tuple(stages)

    def least_us_per_sample(self, most: int) -> float:
        """Return a lower bound of the time per sample over batches of at most ``most`` samples.

        Beyond twice the largest measured batch the interpolation is one straight line, with its minimum at an end.
        """
        measured = max(measurement.at.micro_batch_size for measurement in self.profile.measurements)
        sizes = {*range(1, min(most, 2 * measured) + 1), most}
        least_ns: float = min((self.batch(n).forward_ns + self.batch(n).backward_ns) / n for n in sizes)
        return least_ns / NS_PER_US
