"""The cost of a placement: exact simulation of its schedule, exact peak of every rank, and the rest of the step.

The search and the ``simulate`` command share this file: a plan's reported step time is the replay of that plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mindspeed_autoparallel.cost.buckets import step_tails
from mindspeed_autoparallel.cost.collectives import boundary_link, p2p_us
from mindspeed_autoparallel.cost.memory import PlacedBlock
from mindspeed_autoparallel.cost.overlap import pair_savings_us
from mindspeed_autoparallel.cost.step import PostPipelineTime, embedding_us
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.candidate import Candidate, limit_of
from mindspeed_autoparallel.planner.placement import ModulePlacement, boundary_bytes, check_placement, placed_blocks
from mindspeed_autoparallel.planner.rank_memory import measured_at, memory_of_ranks, point_of, sends_of
from mindspeed_autoparallel.planner.stage_times import (
    NS_PER_US,
    cut_ns,
    per_operation_ns,
    rank_times,
    sharded_times_ns,
    stage_times_ns,
    times_by_module_ns,
)
from mindspeed_autoparallel.planner.variable_data import mean_factors, spread_us
from mindspeed_autoparallel.profiles import DeviceCost, Profile
from mindspeed_autoparallel.schedule import SimulatedStep, StepTimes, program_of_peaks, simulate_folded
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.spec.plan_records import RankMemory, StagePlan, StepTime

SHAPE_BYTES = 24
"""Three sizes of a tensor."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything predicted for one placement under one layout."""

    placement: ModulePlacement
    stages: tuple[StagePlan, ...]
    memory: tuple[RankMemory, ...]
    step: StepTime
    tails: tuple[PostPipelineTime, ...]
    """By pipeline rank, counted from the rank's last backward."""
    simulated: SimulatedStep
    link_us: tuple[float, ...]
    throughput: float
    """Tokens per second and device."""

    @property
    def fits(self) -> bool:
        """Return whether every rank's exact peak is within its limit."""
        return all(rank.peak_bytes <= rank.limit_bytes for rank in self.memory)

    @property
    def step_us(self) -> float:
        """Return the step time."""
        return self.step.total_us


def evaluated(candidate: Candidate, placement: ModulePlacement, *, with_timeline: bool = False) -> Evaluation:
    """Predict one step of a candidate. Raises ``ConfigError`` for placements that no host runs."""
    return evaluate(
        candidate.profile,
        candidate.cluster,
        candidate.layout,
        placement,
        candidate.global_batch_size,
        with_timeline=with_timeline,
    )


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
    """Predict one step. Raises ``ConfigError`` if the layout was not measured or does not divide the batch.

    ``with_timeline``: whether to keep the replay's timeline; without it the bubble of a layout with pairs is 0.
    ``stage_times_us``: forward and backward times of some virtual stages, in place of the computed ones (what-if).
    """
    if layout.modules:
        raise ConfigError("a layout with separate sizes per module cannot be evaluated here: empty layout.modules.")
    measurement = point_of(profile, layout)
    if measurement is None:
        raise ConfigError(f"{layout.label()}: the profile has no measurement for {measured_at(layout).label()}.")
    device, size = profile.device, layout.pipeline_size
    num_microbatches = layout.num_microbatches(global_batch_size)
    sizes = layout.program_sizes(num_microbatches)
    program = program_of_peaks(sizes)
    check_placement(profile.model, layout, placement)
    blocks = placed_blocks(profile.model, measurement, placement)
    if [] in blocks:
        raise ConfigError(f"stage {blocks.index([])} holds no layer: an empty stage cannot run.")
    forward, backward = _passes_ns(profile, cluster, layout, blocks, stage_times_us or {})
    messages = boundary_bytes(profile.model, measurement, placement)
    times = StepTimes(
        forward=forward,
        backward=backward,
        link=_links_ns(layout, cluster, device, messages, placement.prediction_stage),
        per_operation=per_operation_ns(device),
        per_message=round(device.message_us(layout.schedule) * NS_PER_US),
        per_pass=cut_ns(device, layout),
        paired_saving=_savings_ns(profile, layout, blocks),
    )
    sends = sends_of(profile, layout)
    simulated = simulate_folded(sizes, times, sends, with_timeline=with_timeline)
    tails, worst = _tails(blocks, (forward, backward), simulated, layout, cluster, device)
    data = None if stage_times_us else profile.variable_data
    spread = [] if data is None else spread_us(data, list(map(times_by_module_ns, blocks)), sizes, times, sends)
    pipeline_us = sum(spread) / len(spread) if spread else simulated.step_time / NS_PER_US
    tied_us = embedding_us(profile.model, measurement, layout, cluster, device)
    busy_ns = sum(simulated.busy) if layout.paired else num_microbatches * _microbatch_ns(times)
    step = _step_time(pipeline_us, spread, worst, tied_us, _bubble_fraction(simulated, busy_ns / size))
    return Evaluation(
        placement=placement,
        stages=_stage_plans(placement, layout, forward, backward),
        step=step,
        tails=tails,
        simulated=simulated,
        memory=memory_of_ranks(profile, layout, blocks, program, limit_of(device, cluster), messages, measurement),
        link_us=tuple(link / NS_PER_US for link in times.link),
        throughput=_throughput(global_batch_size * profile.model.sequence_length, step.total_us, layout),
    )


def _links_ns(
    layout: Layout, cluster: Cluster, device: DeviceCost, messages: list[int], prediction_stage: int | None
) -> list[int]:
    """Return times of ``messages`` (bytes) between virtual stages.

    With layers of multi-token prediction apart from the loss (``prediction_stage``) messages differ in length, and
    Megatron sends their shapes first.
    """
    links = [boundary_link(layout, cluster, device, v) for v in range(len(messages))]
    times_us = [p2p_us(size, link) for size, link in zip(messages, links, strict=True)]
    if prediction_stage is not None:
        times_us = [time_us + p2p_us(SHAPE_BYTES, link) for time_us, link in zip(times_us, links, strict=True)]
    return [round(time_us * NS_PER_US) for time_us in times_us]


def _savings_ns(profile: Profile, layout: Layout, blocks: list[list[PlacedBlock]]) -> dict[tuple[int, int], int]:
    """Return the nanoseconds that pairs of combined 1F1B save, by virtual stages of forward and backward."""
    if not layout.paired:
        return {}
    # Only one module has pairs.
    factor = mean_factors(profile.variable_data).get(profile.model.modules[-1].name, 1.0) * profile.device.hidden_share
    savings = pair_savings_us(blocks, layout.pipeline_size)
    return {pair: int(saving_us * factor * NS_PER_US) for pair, saving_us in savings.items()}


def _passes_ns(
    profile: Profile,
    cluster: Cluster,
    layout: Layout,
    blocks: list[list[PlacedBlock]],
    given_us: Mapping[int, tuple[float, float]],
) -> tuple[list[int], list[int]]:
    """Return forwards and backwards of virtual stages; ``given_us`` replaces the times of some stages."""
    factors = mean_factors(profile.variable_data)
    forward, backward = stage_times_ns(blocks, factors)
    if layout.sharding is not None:
        forward, backward = sharded_times_ns(blocks[0], factors, layout, cluster, profile.device)
    for v, (forward_us, backward_us) in given_us.items():
        forward[v], backward[v] = round(forward_us * NS_PER_US), round(backward_us * NS_PER_US)
    return forward, backward


def _tails(
    blocks: list[list[PlacedBlock]],
    passes_ns: tuple[list[int], list[int]],
    simulated: SimulatedStep,
    layout: Layout,
    cluster: Cluster,
    device: DeviceCost,
) -> tuple[tuple[PostPipelineTime, ...], PostPipelineTime]:
    """Return the post-pipeline time of every rank, and of the step."""
    size = layout.pipeline_size
    chunks = [[blocks[v] for v in range(rank, len(blocks), size)] for rank in range(size)]
    return step_tails(chunks, rank_times(*passes_ns, simulated), layout, cluster, device)


def with_layout(evaluation: Evaluation, profile: Profile, cluster: Cluster, layout: Layout) -> Evaluation:
    """Return ``evaluation`` for a layout that differs only in overlap of reduction and gathering, hence in its tail."""
    measurement = point_of(profile, layout)
    assert measurement is not None
    blocks = placed_blocks(profile.model, measurement, evaluation.placement)
    forward = [round(stage.forward_us * NS_PER_US) for stage in evaluation.stages]
    backward = [round(stage.backward_us * NS_PER_US) for stage in evaluation.stages]
    tails, worst = _tails(blocks, (forward, backward), evaluation.simulated, layout, cluster, profile.device)
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


def _step_time(
    pipeline_us: float, spread_us: list[float], tail: PostPipelineTime, tied_us: float, bubble_fraction: float
) -> StepTime:
    """Add the time after the pipeline; ``spread_us``: pipeline times of sampled batches if data varies."""
    rest = tail.total_us + tied_us
    return StepTime(
        total_us=pipeline_us + rest,
        pipeline_us=pipeline_us,
        data_parallel_us=tail.data_parallel_us,
        optimizer_us=tail.optimizer_us,
        embedding_us=tied_us,
        bubble_fraction=bubble_fraction,
        p50_us=_percentile(spread_us, 0.5) + rest if spread_us else None,
        p95_us=_percentile(spread_us, 0.95) + rest if spread_us else None,
    )


def _bubble_fraction(simulated: SimulatedStep, busy_ns: float) -> float:
    """Return the share of the pipeline's time in which the average rank does not compute; ``busy_ns``: its compute
    time."""
    return max(0.0, 1 - busy_ns / NS_PER_US / (simulated.step_time / NS_PER_US)) if busy_ns else 0.0


def _microbatch_ns(times: StepTimes) -> float:
    """Return the compute time of all stages for one microbatch, without pairs."""
    passes = [*times.forward, *times.backward]
    return sum(passes) + len(passes) * times.per_operation + 2 * sum(times.per_pass)  # type: ignore[arg-type]  # no rows


def _throughput(num_tokens: int, step_us: float, layout: Layout) -> float:
    """Return tokens per second and device."""
    return num_tokens / (step_us / 1e6) / layout.num_devices if step_us else math.inf


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
                prediction=v == placement.prediction_stage,
            )
        )
        for name, count in here.items():
            done[name] += count
    return tuple(stages)
