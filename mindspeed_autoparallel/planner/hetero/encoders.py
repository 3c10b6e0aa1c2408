"""What one encoder costs under a layout of its own: times and memory of its phases around the pipeline."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from mindspeed_autoparallel.cost.collectives import all_gather_us
from mindspeed_autoparallel.cost.memory import PlacedBlock, static_terms
from mindspeed_autoparallel.cost.redistribution import (
    EncoderExchange,
    all_to_all_us,
    exchange_link,
    exchange_of,
    moved_samples,
)
from mindspeed_autoparallel.cost.step import PostPipelineTime, post_pipeline_time
from mindspeed_autoparallel.planner.layouts.space import Candidate
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, block_times_ns
from mindspeed_autoparallel.planner.variable_data import mean_factors
from mindspeed_autoparallel.profiles import LinkTier, MeasuredAt, Measurement, Profile
from mindspeed_autoparallel.profiles.interpolation import interpolate
from mindspeed_autoparallel.schedule.encoder_rounds import Rounds, backward_us, forward_us
from mindspeed_autoparallel.spec import Cluster, Layout, Module, ModuleLayout
from mindspeed_autoparallel.spec.hetero import EncoderPhase

MEMORY_MODES = ("upfront", "recompute")
"""Of ``--hetero-memory``: keep the encoder's activations, or run its forward again before its backward. Mode window
is not planned: its encoder batches meet the pipeline's stages, and the step is no sum of the two."""
BYTES_OF_AN_ITEM = 48
"""What the owners' plan needs of every sample, where it is not known already."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One encoder batch of some samples on one rank: nanoseconds and bytes."""

    forward_ns: int
    backward_ns: int
    saved_bytes: int
    """Activations and the output, until the backward."""
    transient_bytes: int
    """Highest above them, forward or backward."""
    input_bytes: int


class EncoderCosts:
    """One encoder at one (TP, CP) of the profile; batches of any size, along MBS as the profile interpolates."""

    def __init__(self, profile: Profile, module: Module, point: MeasuredAt) -> None:
        self.profile, self.module, self.point = profile, module, point
        self.factor = mean_factors(profile.variable_data).get(module.name, 1.0)
        self._own = [
            replace(measurement, modules={module.name: measurement.modules[module.name]})
            for measurement in profile.measurements
        ]
        self._measurements: dict[int, Measurement] = {}
        self._batches: dict[int, Batch] = {}
        self._states: dict[tuple[int, bool], tuple[int, PostPipelineTime]] = {}
        self._output_bytes_per_sample: float | None = None

    def measurement(self, samples: int) -> Measurement:
        """Return costs of a batch of ``samples``."""
        if samples not in self._measurements:
            at = MeasuredAt(**{**vars(self.point), "micro_batch_size": samples})
            measured = next((measurement for measurement in self._own if measurement.at == at), None)
            found = measured or interpolate(self._own, at)
            assert found is not None, "the point was measured with some batch"
            self._measurements[samples] = found
        return self._measurements[samples]

    def blocks(self) -> list[PlacedBlock]:
        """Return all blocks, for model state: it does not depend on the batch."""
        cost = self.measurement(self.point.micro_batch_size).modules[self.module.name]
        parts = cost.parts(self.module.num_layers)
        return [PlacedBlock(name="", cost=block) for _, block, count in parts for _ in range(count)]

    def output_bytes(self, samples: float) -> float:
        """Return what the backbone gets for ``samples``."""
        if self._output_bytes_per_sample is None:
            cost = self.measurement(self.point.micro_batch_size).modules[self.module.name]
            self._output_bytes_per_sample = (cost.post or cost.layer).output_bytes / self.point.micro_batch_size
        return self._output_bytes_per_sample * samples

    @functools.cached_property
    def trained(self) -> bool:
        """Return whether any of its parameters is: otherwise there is no graph and no backward phase."""
        return any(block.cost.dense.gradient_bytes or block.cost.expert.gradient_bytes for block in self.blocks())

    def state(self, layout: Layout, cluster: Cluster) -> tuple[int, PostPipelineTime]:
        """Return bytes of parameters, gradients and optimizer on a rank, and what its step takes, for one cluster."""
        key = layout.data_size, layout.distributed_optimizer
        if key not in self._states:
            blocks = self.blocks()
            tail = post_pipeline_time(blocks, layout, cluster, self.profile.device)
            self._states[key] = sum(static_terms(blocks, layout).values()), tail
        return self._states[key]

    def batch(self, samples: int) -> Batch:
        """Return costs of a batch of ``samples``, without recomputation."""
        if samples not in self._batches:
            self._batches[samples] = self._batch(samples)
        return self._batches[samples]

    def _batch(self, samples: int) -> Batch:
        measurement = self.measurement(samples)
        cost = measurement.modules[self.module.name]
        overhead = round(self.profile.device.operation_overhead_us * NS_PER_US)
        forward = backward = saved = transient = 0
        for _, block, count in cost.parts(self.module.num_layers):
            times = block_times_ns(PlacedBlock(name="", cost=block), self.factor)
            forward, backward = forward + count * times[0], backward + count * times[1]
            plain = block.recompute["none"]
            saved += count * plain.saved_bytes
            transient = max(transient, plain.forward_peak_bytes, plain.backward_peak_bytes)
        output = (cost.post or cost.layer).output_bytes
        return Batch(
            forward_ns=forward + overhead,
            backward_ns=backward + overhead if backward else 0,
            saved_bytes=saved + cost.side.kept_bytes + output,
            transient_bytes=transient,
            input_bytes=measurement.batch.kept_bytes,
        )

    def least_us_per_sample(self, most: int) -> float:
        """Return a time per sample that no batch of at most ``most`` samples beats.

        Beyond twice the largest measured batch the interpolation is one straight line, best at an end.
        """
        measured = max(measurement.at.micro_batch_size for measurement in self.profile.measurements)
        sizes = {*range(1, min(most, 2 * measured) + 1), most}
        least_ns: float = min((self.batch(n).forward_ns + self.batch(n).backward_ns) / n for n in sizes)
        return least_ns / NS_PER_US


def own_layout(costs: EncoderCosts, sizes: ModuleLayout, backbone: Layout) -> Layout:
    """Return the encoder's sizes as a layout without pipeline, for model state and its reduction."""
    return Layout(
        tensor_size=sizes.tensor_size,
        context_size=sizes.context_size,
        data_size=sizes.data_size,
        expert_size=costs.point.expert_size,
        distributed_optimizer=backbone.distributed_optimizer,
    )


def encoder_phase(
    costs: EncoderCosts, sizes: ModuleLayout, candidate: Candidate, cluster: Cluster, *, memory: str, balance: str
) -> EncoderPhase:
    """Return the encoder's part of a step beside the backbone of ``candidate``. Formulas H1-H6 in
    docs/cost-model.md."""
    device, backbone = costs.profile.device, candidate.layout
    exchange = exchange_of(backbone, sizes, balance)
    link = exchange_link(exchange, cluster, device)
    train = costs.trained
    again = memory == "recompute" and train
    per_microbatch = backbone.micro_batch_size
    full, rest = divmod(candidate.num_microbatches, sizes.micro_batch_scale)
    kept = transient = most = 0
    moved_bytes = 0.0
    forward, backward = [], []
    windows = [(sizes.micro_batch_scale, full)] * bool(full) + [(rest, 1)] * bool(rest)
    for microbatches, count in windows:
        samples = exchange.samples_of_busiest(microbatches * per_microbatch)
        batch = costs.batch(samples)
        moved = moved_samples(exchange, microbatches * per_microbatch)
        inputs = moved.inputs * batch.input_bytes / samples
        outputs = costs.output_bytes(moved.outputs)
        gradients = costs.output_bytes(moved.gradients) if train else 0.0
        moved_bytes += count * (inputs + outputs + gradients)
        there_us = batch.forward_ns / NS_PER_US + all_to_all_us(inputs, link)
        forward.append(Rounds(count=count, compute_us=there_us, transfer_us=all_to_all_us(outputs, link)))
        if train:
            back_us = (batch.backward_ns + (batch.forward_ns if again else 0)) / NS_PER_US
            backward.append(Rounds(count=count, compute_us=back_us, transfer_us=all_to_all_us(gradients, link)))
            kept += count * (batch.input_bytes if again else batch.saved_bytes)
        transient = max(transient, batch.transient_bytes + (batch.saved_bytes if again or not train else 0))
        most = max(most, samples)
    compute = [sum(run.count * run.compute_us for run in runs) for runs in (forward, backward)]
    unhidden_us = forward_us(forward) + backward_us(backward) - sum(compute)
    state_bytes, tail = costs.state(own_layout(costs, sizes, backbone), cluster)
    rows_bytes = candidate.num_microbatches * costs.output_bytes(per_microbatch)
    return EncoderPhase(
        module=costs.module.name,
        layout=sizes,
        num_macro_batches=full + bool(rest),
        samples=most,
        forward_us=compute[0],
        backward_us=compute[1],
        exchange_us=max(0.0, unhidden_us) + _metadata_us(exchange, balance, candidate, link),
        reduction_us=tail.data_parallel_us if train else 0.0,
        optimizer_us=tail.optimizer_us if train else 0.0,
        moved_bytes=round(moved_bytes),
        state_bytes=state_bytes,
        kept_bytes=kept,
        transient_bytes=transient,
        # The merged rows and their gradient.
        first_stage_bytes=round((2 if train else 1) * rows_bytes),
        num_layers=costs.module.num_layers,
        interpolated_from=costs.measurement(most).interpolated_from,
    )


def _metadata_us(exchange: EncoderExchange, balance: str, candidate: Candidate, link: LinkTier) -> float:
    """Return counts and sizes of the step's samples, gathered where replicas do not read each other's data."""
    if exchange.nested and balance != "global":
        return 0.0
    ranks = exchange.encoder_replicas * exchange.encoder_width
    samples = exchange.backbone_replicas * candidate.num_microbatches * candidate.layout.micro_batch_size
    size = BYTES_OF_AN_ITEM * samples
    return all_gather_us(8 * ranks, ranks, link) + all_gather_us(size * ranks / exchange.backbone_replicas, ranks, link)
