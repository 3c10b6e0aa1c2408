"""The cost of a generator under a separate layout: all stages of the backbone join an exchange per microbatch.

An exchange brings targets and the decoder's rows to the generator's ranks, runs its forward and backward there, and
brings losses and gradients back; every stage takes part from beginning to end. So a step is the pipeline that stops at
all exchanges (``schedule.exchanges``) plus their sum. Formula H9 in docs/cost-model.md.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.cost.redistribution import (
    EncoderExchange,
    all_to_all_us,
    exchange_link,
    exchange_of,
    generator_samples,
)
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.planner.hetero.encoders import message_us, metadata_us, own_layout
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.profiles import LinkTier
from mindspeed_autoparallel.schedule.encoder_pipeline import StagedRounds, staged_backward_us
from mindspeed_autoparallel.spec import Cluster, Layout, ModuleLayout
from mindspeed_autoparallel.spec.hetero import EncoderMemory, EncoderPhase


def generator_phase(costs: EncoderCosts, sizes: ModuleLayout, candidate: Candidate, *, balance: str) -> EncoderPhase:
    """Return the generator's part of a step with the backbone of ``candidate``, without the waiting time that exchanges
    add to the backbone's pipeline."""
    device, backbone = costs.profile.device, candidate.layout
    cluster = candidate.cluster
    exchange = exchange_of(backbone, sizes, balance)
    link = exchange_link(exchange, cluster, device)
    own = own_layout(costs, sizes, backbone)
    samples = exchange.samples_of_busiest(backbone.micro_batch_size)
    stages = costs.staged(samples if own.pipeline_size == 1 else 1, own.pipeline_size)
    compute_us, forward_us = _compute_us(costs, samples, own, cluster)
    transfers_us, moved_bytes = _transfers(costs, exchange, candidate, link)
    state_bytes, tail = costs.state(own, cluster)
    # It runs while the pipeline holds its activations, so its peak is reserved throughout.
    at_once = [1] if own.pipeline_size == 1 else [min(samples, own.pipeline_size - s) for s in range(own.pipeline_size)]
    kept = [count * stage.saved_bytes + stage.transient_bytes for count, stage in zip(at_once, stages, strict=True)]
    ranks = tuple(
        EncoderMemory(state_bytes=state, kept_bytes=held) for state, held in zip(state_bytes, kept, strict=True)
    )
    fullest = max(ranks, key=lambda rank: rank.state_bytes + rank.kept_bytes)
    count = candidate.num_microbatches
    return EncoderPhase(
        module=costs.module.name,
        layout=sizes,
        num_macro_batches=count,
        samples=samples,
        forward_us=count * forward_us,
        backward_us=count * (compute_us - forward_us),
        exchange_us=count * transfers_us + metadata_us(exchange, balance, candidate, link),
        reduction_us=tail.data_parallel_us if costs.trained else 0.0,
        optimizer_us=tail.optimizer_us if costs.trained else 0.0,
        moved_bytes=round(count * moved_bytes),
        state_bytes=fullest.state_bytes,
        kept_bytes=fullest.kept_bytes,
        transient_bytes=0,
        first_stage_bytes=0,
        num_layers=costs.module.num_layers,
        stage_layers=costs.stage_layers(own.pipeline_size) if own.pipeline_size > 1 else (),
        stage_memory=ranks if len(set(ranks)) > 1 else (),
        interpolated_from=costs.measurement(samples).interpolated_from,
        generator=True,
    )


def can_exchange(candidate: Candidate) -> bool:
    """Return whether a generator can have a separate layout with this backbone."""
    layout = candidate.layout
    return (
        layout.virtual_size == 1
        and not layout.paired
        and layout.schedule == "1f1b"
        and candidate.num_microbatches >= layout.pipeline_size
    )


def meeting(candidate: Candidate) -> Candidate:
    """Return ``candidate`` with exchanges inside its pipeline."""
    return replace(candidate, layout=replace(candidate.layout, meets=True))


def _compute_us(costs: EncoderCosts, samples: int, own: Layout, cluster: Cluster) -> tuple[float, float]:
    """Return forward and backward of one microbatch's items, and the forward alone if no pipeline mixes them."""
    if own.pipeline_size == 1:
        batch = costs.batch(samples)
        return (batch.forward_ns + batch.backward_ns) / NS_PER_US, batch.forward_ns / NS_PER_US
    stages = costs.staged(1, own.pipeline_size)
    forward_us = tuple(stage.forward_ns / NS_PER_US for stage in stages)
    # An item is a microbatch of the generator's 1F1B.
    rounds = StagedRounds(
        count=samples,
        forward_us=forward_us,
        backward_us=tuple(stage.backward_ns / NS_PER_US for stage in stages),
        again_us=forward_us,
        message_us=message_us(own, stages, cluster, costs.profile.device),
    )
    return staged_backward_us([rounds]), samples * max(forward_us)


def _transfers(
    costs: EncoderCosts, exchange: EncoderExchange, candidate: Candidate, link: LinkTier
) -> tuple[float, float]:
    """Return microseconds and the busiest rank's bytes of one microbatch's transfers."""
    size = candidate.layout.micro_batch_size
    moved, numbers = generator_samples(exchange, size)
    samples = exchange.samples_of_busiest(size)
    batch = costs.staged(samples, exchange.encoder.pipeline_size)[0]
    targets = moved.inputs * batch.input_bytes / samples
    rows, gradients = costs.rows_bytes(moved.gradients), costs.rows_bytes(moved.outputs)
    moving_us = sum(all_to_all_us(size_bytes, link) for size_bytes in (targets, rows, gradients))
    # Each row carries one number in both directions: little more than the call itself.
    calls = (numbers.gradients > 0) + (numbers.outputs > 0)
    return moving_us + calls * link.of("all_to_all").latency_us, targets + rows + gradients
