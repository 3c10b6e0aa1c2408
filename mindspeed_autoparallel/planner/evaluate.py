"""What a placement costs: exact simulation of its schedule, exact peak of every rank, and the rest of the step.

The search and the ``simulate`` command share this file: a plan's reported step time is the replay of that plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mindspeed_autoparallel.cost.buckets import RankTimes, bucketed_tails
from mindspeed_autoparallel.cost.collectives import p2p_us
from mindspeed_autoparallel.cost.memory import PlacedBlock, Traffic, mindspeed_stage_bytes, rank_peak
from mindspeed_autoparallel.cost.pairing import unpaired_us
from mindspeed_autoparallel.cost.sharding import passes_us, units_of
from mindspeed_autoparallel.cost.step import RankTail, embedding_us, rank_tail
from mindspeed_autoparallel.cost.topology import boundary_link, data_parallel_link
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.placement import ModulePlacement, boundary_bytes, placed_blocks
from mindspeed_autoparallel.planner.variable_data import mean_factors, sampled_times
from mindspeed_autoparallel.profiles import DeviceCost, MeasuredAt, Measurement, Profile
from mindspeed_autoparallel.schedule import Program, SimulatedStep, StepTimes, in_flight, make_program, simulate
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.spec.plan import RankMemory, StagePlan, StepTime

NS_PER_US = 1000


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything predicted for one placement under one layout."""

    stages: tuple[StagePlan, ...]
    memory: tuple[RankMemory, ...]
    step: StepTime
    tails: tuple[RankTail, ...]
    simulated: SimulatedStep
    link_us: tuple[float, ...]
    throughput: float
    """Tokens per second and device."""

    @property
    def fits(self) -> bool:
        """Return whether every rank's exact peak is within its limit."""
        return all(rank.peak_bytes <= rank.limit_bytes for rank in self.memory)


def measured_at(layout: Layout) -> MeasuredAt:
    """Return the point of the profile that a layout's ranks run at."""
    return MeasuredAt(
        tensor_size=layout.tensor_size,
        context_size=layout.context_size,
        expert_size=layout.expert_size,
        micro_batch_size=layout.micro_batch_size,
        sequence_parallel=layout.sequence_parallel,
    )


def sends_of(profile: Profile, layout: Layout) -> str:
    """Return how messages are treated (``schedule.SENDS``): as the host does it; MindSpeed's formulas let them
    travel."""
    if profile.memory_semantics == "mindspeed":
        return "eager"
    return profile.interleaved_sends if layout.schedule == "interleaved" else "blocking"


def evaluate(
    profile: Profile,
    cluster: Cluster,
    layout: Layout,
    placement: ModulePlacement,
    global_batch_size: int,
    *,
    with_timeline: bool = True,
    stage_times_us: Mapping[int, tuple[float, float]] | None = None,
) -> Evaluation:
    """Predict one step. Raises ``ConfigError`` where the layout was not measured or the batch does not divide.

    ``stage_times_us``: forward and backward of some virtual stages, given instead of computed (what-if).
    """
    if layout.modules:
        raise ConfigError("a layout with sizes of its own per module is not evaluated here: empty layout.modules.")
    measurement = profile.at(measured_at(layout))
    if measurement is None:
        raise ConfigError(f"{layout.label()}: the profile has no measurement for {measured_at(layout).label()}.")
    device, size = profile.device, layout.pipeline_size
    num_microbatches = layout.num_microbatches(global_batch_size)
    program = make_program(layout.schedule, size, num_microbatches, layout.virtual_size)
    blocks = placed_blocks(profile.model, measurement, placement)
    for v, held in enumerate(blocks):
        if not held:
            raise ConfigError(f"stage {v} holds no layer: an empty stage cannot run.")
    factors = mean_factors(profile.variable_data)
    forward, backward = _stage_times(blocks, factors)
    if layout.sharding is not None:
        forward, backward = _sharded_times(blocks[0], factors, layout, cluster, device)
    for v, (forward_us, backward_us) in (stage_times_us or {}).items():
        forward[v], backward[v] = round(forward_us * NS_PER_US), round(backward_us * NS_PER_US)
    messages = boundary_bytes(profile.model, measurement, placement)
    links = [
        round(p2p_us(num_bytes, boundary_link(layout, cluster, device, v)) * NS_PER_US)
        for v, num_bytes in enumerate(messages)
    ]
    times = StepTimes(
        forward=forward,
        backward=backward,
        link=links,
        per_operation=_per_operation_ns(device),
        per_message=round(device.message_us(layout.schedule) * NS_PER_US),
        per_pass=_cut_ns(device, layout),
    )
    sends = sends_of(profile, layout)
    simulated = simulate(program, times, sends=sends, with_timeline=with_timeline)
    ranks = [[block for v in range(rank, len(blocks), size) for block in blocks[v]] for rank in range(size)]
    if layout.bucket_elements and layout.sharding is None:
        chunks = [[blocks[v] for v in range(rank, len(blocks), size)] for rank in range(size)]
        tails, worst = bucketed_tails(chunks, _rank_times(forward, backward, size), layout, cluster, device)
    else:
        tails = tuple(
            rank_tail(held, layout, cluster, device, hidden_us=sum(backward[rank::size]) / NS_PER_US)
            for rank, held in enumerate(ranks)
        )
        worst = max(tails, key=lambda tail: tail.total_us)
    tied = embedding_us(profile.model, measurement, layout, cluster, device)
    pipeline_us = simulated.step_time / NS_PER_US
    spread: list[float] = []
    if profile.variable_data is not None and not stage_times_us:
        sampled = sampled_times(profile.variable_data, [_by_module(held) for held in blocks], num_microbatches)
        spread = [
            simulate(program, replace(times, forward=f, backward=b), sends=sends).step_time / NS_PER_US
            for f, b in sampled
        ]
        pipeline_us = sum(spread) / len(spread)
    if layout.paired:
        pipeline_us += unpaired_us(blocks, layout, num_microbatches)
    rest = worst.total_us + tied
    total_us = pipeline_us + rest
    busy = sum(simulated.busy) / size / NS_PER_US
    step = StepTime(
        total_us=total_us,
        pipeline_us=pipeline_us,
        data_parallel_us=worst.data_parallel_us,
        optimizer_us=worst.optimizer_us,
        embedding_us=tied,
        bubble_fraction=max(0.0, 1 - busy / (simulated.step_time / NS_PER_US)) if with_timeline and busy else 0.0,
        p50_us=_percentile(spread, 0.5) + rest if spread else None,
        p95_us=_percentile(spread, 0.95) + rest if spread else None,
    )
    limit = cluster.memory_limit_bytes or device.memory_capacity_bytes
    return Evaluation(
        stages=_stage_plans(placement, layout, forward, backward),
        step=step,
        tails=tails,
        simulated=simulated,
        memory=_memory(profile, layout, blocks, program, limit, messages, measurement),
        link_us=tuple(link / NS_PER_US for link in links),
        throughput=global_batch_size * profile.model.sequence_length / (total_us / 1e6) / layout.num_devices
        if total_us
        else math.inf,
    )


def with_layout(
    evaluation: Evaluation, profile: Profile, cluster: Cluster, layout: Layout, placement: ModulePlacement
) -> Evaluation:
    """Return ``evaluation`` under a layout that differs in overlap of reduction and gathering only: another tail."""
    measurement = profile.at(measured_at(layout))
    assert measurement is not None
    blocks, size = placed_blocks(profile.model, measurement, placement), layout.pipeline_size
    forward = [round(stage.forward_us * NS_PER_US) for stage in evaluation.stages]
    backward = [round(stage.backward_us * NS_PER_US) for stage in evaluation.stages]
    chunks = [[blocks[v] for v in range(rank, len(blocks), size)] for rank in range(size)]
    tails, worst = bucketed_tails(chunks, _rank_times(forward, backward, size), layout, cluster, profile.device)
    before = evaluation.step
    more_us = worst.total_us - before.data_parallel_us - before.optimizer_us
    total_us = before.total_us + more_us
    step = replace(
        before,
        total_us=total_us,
        data_parallel_us=worst.data_parallel_us,
        optimizer_us=worst.optimizer_us,
        p50_us=None if before.p50_us is None else before.p50_us + more_us,
        p95_us=None if before.p95_us is None else before.p95_us + more_us,
    )
    throughput = evaluation.throughput * before.total_us / total_us if total_us else math.inf
    return replace(evaluation, step=step, tails=tails, throughput=throughput)


def fits_rank(
    profile: Profile,
    cluster: Cluster,
    layout: Layout,
    placement: ModulePlacement,
    num_microbatches: int,
    rank: int,
) -> bool:
    """Return whether one rank's exact peak is within its limit. The layout must be measured."""
    measurement = profile.at(measured_at(layout))
    assert measurement is not None
    program = make_program(layout.schedule, layout.pipeline_size, num_microbatches, layout.virtual_size)
    (memory,) = _memory(
        profile,
        layout,
        placed_blocks(profile.model, measurement, placement),
        program,
        cluster.memory_limit_bytes or profile.device.memory_capacity_bytes,
        boundary_bytes(profile.model, measurement, placement),
        measurement,
        only_rank=rank,
    )
    return memory.peak_bytes <= memory.limit_bytes


def block_times_ns(block: PlacedBlock, factor: float = 1.0) -> tuple[int, int]:
    """Forward and backward of one block in nanoseconds, recomputation included."""
    backward = round(block.cost.backward_us * NS_PER_US * factor)
    return (
        round(block.cost.forward_us * NS_PER_US * factor),
        backward + round(block.recompute.extra_backward_us * NS_PER_US * factor),
    )


def _stage_times(blocks: list[list[PlacedBlock]], factors: dict[str, float]) -> tuple[list[int], list[int]]:
    forward, backward = [], []
    for held in blocks:
        pairs = [block_times_ns(block, factors.get(block.name.split()[0], 1.0)) for block in held]
        forward.append(sum(pair[0] for pair in pairs))
        backward.append(sum(pair[1] for pair in pairs))
    return forward, backward


def _cut_ns(device: DeviceCost, layout: Layout) -> list[int]:
    """Return by virtual stage what being cut adds to a forward, and to a backward."""
    number = layout.num_virtual_stages
    if layout.pipeline_size == 1:
        return [0] * number
    return [round(device.stage_overhead.at(v, number) * NS_PER_US / 2) for v in range(number)]


def _per_operation_ns(device: DeviceCost) -> int:
    return round(device.operation_overhead_us * NS_PER_US)


def beside_blocks_ns(device: DeviceCost, layout: Layout) -> list[int]:
    """Return by virtual stage what the host adds to a forward, and to a backward, whatever blocks the stage holds."""
    return [_per_operation_ns(device) + cut for cut in _cut_ns(device, layout)]


def _sharded_times(
    blocks: list[PlacedBlock], factors: dict[str, float], layout: Layout, cluster: Cluster, device: DeviceCost
) -> tuple[list[int], list[int]]:
    """Return times of the one stage, with what shows of gathering parameters and reducing gradients."""
    assert layout.sharding is not None
    pairs = [block_times_ns(block, factors.get(block.module, 1.0)) for block in blocks]
    times = [(forward / NS_PER_US, backward / NS_PER_US) for forward, backward in pairs]
    units = units_of(blocks, times, layout, data_parallel_link(layout, cluster, device))
    forward_us, backward_us = passes_us(blocks, units, layout.sharding, device.hidden_share)
    return [round(forward_us * NS_PER_US)], [round(backward_us * NS_PER_US)]


def _rank_times(forward: list[int], backward: list[int], size: int) -> list[RankTimes]:
    return [
        RankTimes(
            forward_us=[time / NS_PER_US for time in forward[rank::size]],
            backward_us=[time / NS_PER_US for time in backward[rank::size]],
            forward_before_us=sum(forward[:rank]) / NS_PER_US,
            backward_before_us=sum(backward[:rank]) / NS_PER_US,
        )
        for rank in range(size)
    ]


def _by_module(blocks: list[PlacedBlock]) -> dict[str, tuple[int, int]]:
    total: dict[str, tuple[int, int]] = {}
    for block in blocks:
        name, (forward, backward) = block.name.split()[0], block_times_ns(block)
        before = total.get(name, (0, 0))
        total[name] = (before[0] + forward, before[1] + backward)
    return total


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _stage_plans(
    placement: ModulePlacement, layout: Layout, forward: list[int], backward: list[int]
) -> tuple[StagePlan, ...]:
    stages = []
    done = dict.fromkeys(placement.layers, 0)
    for v in range(layout.num_virtual_stages):
        here = {name: row[v] for name, row in placement.layers.items()}
        stages.append(
            StagePlan(
                stage=v,
                pipeline_rank=v % layout.pipeline_size,
                chunk=v // layout.pipeline_size,
                layers=here,
                first_layer={name: done[name] for name, count in here.items() if count},
                recompute={
                    name: {kind: row[v] for kind, row in kinds.items() if row[v]}
                    for name, kinds in placement.recompute.items()
                    if any(row[v] for row in kinds.values())
                },
                forward_us=forward[v] / NS_PER_US,
                backward_us=backward[v] / NS_PER_US,
            )
        )
        for name, count in here.items():
            done[name] += count
    return tuple(stages)


def _memory(
    profile: Profile,
    layout: Layout,
    blocks: list[list[PlacedBlock]],
    program: Program,
    limit: int,
    messages: list[int],
    measurement: Measurement,
    only_rank: int | None = None,
) -> tuple[RankMemory, ...]:
    batch, overhead = measurement.batch, profile.overhead_bytes(measurement)
    device = replace(profile.device, runtime_overhead_bytes=overhead)
    ranks = []
    for rank in range(layout.pipeline_size) if only_rank is None else (only_rank,):
        chunks = [blocks[v] for v in range(rank, len(blocks), layout.pipeline_size)]
        if profile.memory_semantics == "mindspeed":
            held = in_flight(program)[rank]
            everything = [block for chunk in chunks for block in chunk]
            terms = mindspeed_stage_bytes(everything, held, layout)
            ranks.append(
                RankMemory(
                    pipeline_rank=rank,
                    peak_bytes=sum(terms.values()),
                    limit_bytes=limit,
                    peak_point=f"{held} microbatches in flight",
                    terms=terms,
                )
            )
            continue
        around = [0, *messages, 0]
        traffic = [
            Traffic(
                received_bytes=around[v],
                sent_bytes=around[v + 1],
                batch_bytes=batch.total_bytes - (0 if v else batch.kept_bytes),
            )
            for v in range(rank, len(blocks), layout.pipeline_size)
        ]
        peak = rank_peak(chunks, program[rank], layout, device, traffic, rank=rank, sends=sends_of(profile, layout))
        ranks.append(
            RankMemory(
                pipeline_rank=rank,
                peak_bytes=peak.peak_bytes,
                limit_bytes=limit,
                peak_point=peak.point,
                terms=peak.terms,
                runtime_overhead_bytes=overhead,
            )
        )
    return tuple(ranks)


def point_of(profile: Profile, layout: Layout) -> Measurement | None:
    """Return the costs under a layout, or ``None`` where the profile cannot tell."""
    return profile.at(measured_at(layout))
