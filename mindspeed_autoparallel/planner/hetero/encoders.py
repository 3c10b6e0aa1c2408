"""The cost of one encoder under a separate layout: times and memory of its phases around the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.cost.collectives import all_gather_us, boundary_link, p2p_us
from mindspeed_autoparallel.cost.redistribution import (
    EncoderExchange,
    all_to_all_us,
    exchange_link,
    exchange_of,
    stage_loads,
)
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.hetero.encoder_costs import Batch, EncoderCosts
from mindspeed_autoparallel.planner.hetero.encoder_memory import (
    Window,
    held_in_window,
    held_upfront,
    stage_memory,
    windows_of,
)
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.profiles import DeviceCost, LinkTier
from mindspeed_autoparallel.schedule.encoder_pipeline import (
    Rounds,
    StagedRounds,
    backward_us,
    forward_us,
    staged_backward_us,
    staged_forward_us,
)
from mindspeed_autoparallel.schedule.window import MacroBatchTimes, num_alive, ticks_of
from mindspeed_autoparallel.spec import Cluster, Layout, ModuleLayout
from mindspeed_autoparallel.spec.hetero import MEMORY_MODES, WINDOW, EncoderPhase

SUMMED_MODES = tuple(mode for mode in MEMORY_MODES if mode != WINDOW)
"""Memory modes in which the step is a sum of phases; ``windowed`` replays the other one."""
BYTES_OF_AN_ITEM = 48
"""Metadata bytes per sample for the owners' plan, if they are not known already."""


def own_layout(costs: EncoderCosts, sizes: ModuleLayout, backbone: Layout) -> Layout:
    """Return the encoder's sizes as a layout, for model state, its reduction and the links between its stages."""
    return Layout(
        pipeline_size=sizes.pipeline_size,
        tensor_size=sizes.tensor_size,
        context_size=sizes.context_size,
        data_size=sizes.data_size,
        expert_size=costs.point.expert_size,
        distributed_optimizer=backbone.distributed_optimizer,
    )


def tick_sizes(candidate: Candidate) -> tuple[int, int, int, int]:
    """Return the arguments of ``schedule.window.ticks_of`` for the backbone's schedule."""
    _, stages, count, chunks, group_size, _ = candidate.layout.program_sizes(candidate.num_microbatches)
    return stages, count, chunks, group_size


def encoder_phase(
    costs: EncoderCosts, sizes: ModuleLayout, candidate: Candidate, *, memory: str, balance: str
) -> EncoderPhase:
    """Return the encoder's part of a step with the backbone of ``candidate``. Formulas H1-H7 in docs/cost-model.md."""
    device, backbone = costs.profile.device, candidate.layout
    cluster = candidate.cluster
    exchange = exchange_of(backbone, sizes, balance)
    link = exchange_link(exchange, cluster, device)
    own = own_layout(costs, sizes, backbone)
    windows = windows_of(costs, exchange, candidate, again=memory == "recompute" and costs.trained)
    runs = [_rounds(costs, window, own, cluster, link) for window in windows]
    forward, backward = _forward_us(runs), _backward_us(runs)
    if memory == WINDOW:
        forward, backward = _one_by_one(runs)
    state_bytes, tail = costs.state(own, cluster)
    held = [held_upfront(costs, windows, stage, sizes.pipeline_size) for stage in range(sizes.pipeline_size)]
    microbatches = candidate.num_microbatches
    alive = None
    if memory == WINDOW:
        alive = num_alive(ticks_of(*tick_sizes(candidate)), sizes.micro_batch_scale)
        held = [held_in_window(costs, windows, alive)]
        microbatches = min(microbatches, alive * sizes.micro_batch_scale)
    # The search counts the fullest rank for all ranks; ``stage_memory`` counts each rank.
    fullest = max(range(len(held)), key=lambda stage: state_bytes[stage] + held[stage][0])
    rows_bytes = microbatches * costs.output_bytes(backbone.micro_batch_size)
    most = max(window.samples for window in windows)
    return EncoderPhase(
        module=costs.module.name,
        layout=sizes,
        num_macro_batches=sum(window.count for window in windows),
        samples=most,
        forward_us=forward.compute_us,
        backward_us=backward.compute_us,
        exchange_us=forward.exchange_us + backward.exchange_us + metadata_us(exchange, balance, candidate, link),
        reduction_us=tail.data_parallel_us if costs.trained else 0.0,
        optimizer_us=tail.optimizer_us if costs.trained else 0.0,
        moved_bytes=round(sum(window.count * window.moved_bytes for window in windows)),
        state_bytes=state_bytes[fullest],
        kept_bytes=held[fullest][0],
        transient_bytes=max(transient for _, transient in held),
        # The merged rows and their gradient.
        first_stage_bytes=round((2 if costs.trained else 1) * rows_bytes),
        num_layers=costs.module.num_layers,
        stage_layers=costs.stage_layers(sizes.pipeline_size) if sizes.pipeline_size > 1 else (),
        stage_memory=stage_memory(costs, windows, state_bytes, held, alive),
        interpolated_from=costs.measurement(most).interpolated_from,
    )


def macro_batches(
    costs: EncoderCosts, sizes: ModuleLayout, candidate: Candidate, *, balance: str
) -> tuple[MacroBatchTimes, ...]:
    """Return the macro-batches of a step, each with its own times, as mode window runs them. The encoder has no
    pipeline."""
    cluster = candidate.cluster
    exchange = exchange_of(candidate.layout, sizes, balance)
    link, own = exchange_link(exchange, cluster, costs.profile.device), own_layout(costs, sizes, candidate.layout)
    found: list[MacroBatchTimes] = []
    for window in windows_of(costs, exchange, candidate, again=False):
        run = _rounds(costs, window, own, cluster, link)
        for _ in range(window.count):
            first = len(found) * sizes.micro_batch_scale
            last = min(first + sizes.micro_batch_scale, candidate.num_microbatches) - 1
            loads = stage_loads(exchange, (last - first + 1) * candidate.layout.micro_batch_size)
            passes = [costs.batch(load) if load else None for load in loads]
            found.append(
                MacroBatchTimes(
                    first=first,
                    last=last,
                    inputs_us=run.inputs_us,
                    forward_us=[0.0 if one is None else one.forward_ns / NS_PER_US for one in passes],
                    outputs_us=run.outputs_us,
                    gradients_us=run.gradients_us,
                    backward_us=[
                        one.backward_ns / NS_PER_US if one is not None and costs.trained else 0.0 for one in passes
                    ],
                )
            )
    return tuple(found)


def _one_by_one(runs: Sequence[StagedRounds]) -> tuple[_Time, _Time]:
    """Return forward and backward times if every transfer is waited for at once."""
    return (
        _Time(
            compute_us=sum(run.count * run.forward_us[0] for run in runs),
            exchange_us=sum(run.count * (run.inputs_us + run.outputs_us) for run in runs),
        ),
        _Time(
            compute_us=sum(run.count * run.backward_us[0] for run in runs if run.backward_us),
            exchange_us=sum(run.count * run.gradients_us for run in runs),
        ),
    )


def _rounds(costs: EncoderCosts, window: Window, own: Layout, cluster: Cluster, link: LinkTier) -> StagedRounds:
    """Return the stages' rounds for these macro-batches, in microseconds."""
    stages = costs.staged(window.samples, own.pipeline_size)
    forward_us = tuple(batch.forward_ns / NS_PER_US for batch in stages)
    return StagedRounds(
        count=window.count,
        forward_us=forward_us,
        backward_us=tuple(batch.backward_ns / NS_PER_US for batch in stages) if costs.trained else (),
        again_us=forward_us if window.again else (0.0,) * len(stages),
        message_us=message_us(own, stages, cluster, costs.profile.device),
        inputs_us=all_to_all_us(window.inputs, link),
        outputs_us=all_to_all_us(window.outputs, link),
        gradients_us=all_to_all_us(window.gradients, link),
    )


def message_us(own: Layout, stages: Sequence[Batch], cluster: Cluster, device: DeviceCost) -> float:
    """Return the longest message between neighbouring stages of a module's pipeline, including the shape sent first."""
    between = [boundary_link(own, cluster, device, stage) for stage in range(own.pipeline_size - 1)]
    return max(
        (p2p_us(0, one) + p2p_us(batch.output_bytes, one) for one, batch in zip(between, stages, strict=False)),
        default=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class _Time:
    """One direction of a phase: its time without transfers to or from the backbone, and the time they add."""

    compute_us: float
    exchange_us: float


def _forward_us(runs: Sequence[StagedRounds]) -> _Time:
    if len(runs[0].forward_us) > 1:
        compute_us = staged_forward_us([run.without_transfers() for run in runs])
        total_us = staged_forward_us(runs)
    else:
        compute_us = sum(run.count * run.forward_us[0] for run in runs)
        total_us = forward_us(
            [
                Rounds(
                    count=run.count, compute_us=run.forward_us[0], transfer_us=run.outputs_us, inputs_us=run.inputs_us
                )
                for run in runs
            ]
        )
    return _Time(compute_us=compute_us, exchange_us=max(0.0, total_us - compute_us))


def _backward_us(runs: Sequence[StagedRounds]) -> _Time:
    if not runs[0].backward_us:
        return _Time(compute_us=0.0, exchange_us=0.0)
    if len(runs[0].forward_us) > 1:
        compute_us = staged_backward_us([run.without_transfers() for run in runs])
        total_us = staged_backward_us(runs)
    else:
        compute_us = sum(run.count * (run.backward_us[0] + run.again_us[0]) for run in runs)
        total_us = backward_us(
            [
                Rounds(
                    count=run.count,
                    compute_us=run.backward_us[0],
                    transfer_us=run.gradients_us,
                    before_us=run.again_us[0],
                )
                for run in runs
            ]
        )
    return _Time(compute_us=compute_us, exchange_us=max(0.0, total_us - compute_us))


def metadata_us(exchange: EncoderExchange, balance: str, candidate: Candidate, link: LinkTier) -> float:
    """Return the time to gather sample counts and sizes, if replicas do not read each other's data."""
    if exchange.nested and balance != "global":
        return 0.0
    ranks = exchange.num_ranks
    samples = exchange.backbone_replicas * candidate.num_microbatches * candidate.layout.micro_batch_size
    size = BYTES_OF_AN_ITEM * samples
    return all_gather_us(8 * ranks, ranks, link) + all_gather_us(size * ranks / exchange.backbone_replicas, ranks, link)
