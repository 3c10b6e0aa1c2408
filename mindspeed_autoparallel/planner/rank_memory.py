"""Exact peak of every rank, and the profile point of its blocks."""

from __future__ import annotations

from dataclasses import fields, replace

from mindspeed_autoparallel.cost.memory import PlacedBlock, Traffic, mindspeed_stage_bytes, rank_peak
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.placement import ModulePlacement, boundary_bytes, placed_blocks
from mindspeed_autoparallel.profiles import MeasuredAt, Measurement, ModuleCost, Profile, StateBytes
from mindspeed_autoparallel.schedule import Program, in_flight, program_of_peaks
from mindspeed_autoparallel.schedule.exchanges import MET
from mindspeed_autoparallel.spec import Layout
from mindspeed_autoparallel.spec.plan_records import RankMemory


def measured_at(layout: Layout) -> MeasuredAt:
    """Return the point of the profile that a layout's ranks run at."""
    return MeasuredAt(
        tensor_size=layout.tensor_size,
        context_size=layout.context_size,
        expert_size=layout.expert_size,
        micro_batch_size=layout.micro_batch_size,
        sequence_parallel=layout.sequence_parallel,
        expert_tensor_size=layout.expert_tensor_size if layout.expert_tensor_size != layout.tensor_size else 0,
    )


def point_of(profile: Profile, layout: Layout) -> Measurement | None:
    """Return the costs under a layout, or ``None`` if the profile lacks them.

    A pipeline of one stage reads one embedding twice where longer ones hold a copy of it (``ModuleCost.tied_copy``).
    """
    measurement = profile.at(measured_at(layout))
    if measurement is None or layout.pipeline_size > 1:
        return measurement
    modules = {name: _with_one_embedding(cost) for name, cost in measurement.modules.items()}
    return measurement if modules == measurement.modules else replace(measurement, modules=modules)


def _with_one_embedding(cost: ModuleCost) -> ModuleCost:
    copy = cost.tied_copy
    if cost.post is None or copy == StateBytes():
        return cost
    held = {item.name: getattr(cost.post.dense, item.name) - getattr(copy, item.name) for item in fields(StateBytes)}
    return replace(cost, post=replace(cost.post, dense=StateBytes(**held)), tied_copy=StateBytes())


def sends_of(profile: Profile, layout: Layout) -> str:
    """Return how messages are treated (``schedule.SENDS``): as the host does it; MindSpeed's formulas let them
    travel."""
    if profile.memory_semantics == "mindspeed":
        return "eager"
    if layout.meets:
        return MET
    return profile.interleaved_sends if layout.schedule == "interleaved" else "blocking"


def memory_of_ranks(
    profile: Profile,
    layout: Layout,
    blocks: list[list[PlacedBlock]],
    program: Program,
    limit: int,
    messages: list[int],
    measurement: Measurement,
    only_rank: int | None = None,
) -> tuple[RankMemory, ...]:
    """Return terms and peak of every pipeline rank, or of ``only_rank``; ``messages``: bytes between virtual stages."""
    batch, overhead = measurement.batch, profile.overhead_bytes(measurement)
    device = profile.device
    if overhead != device.runtime_overhead_bytes:
        device = replace(device, runtime_overhead_bytes=overhead)
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


def fits_rank(candidate: Candidate, placement: ModulePlacement, rank: int) -> bool:
    """Return whether one rank's exact peak is within its limit."""
    memory = memory_of_rank(candidate, placement, rank)
    return memory.peak_bytes <= memory.limit_bytes


def memory_of_rank(candidate: Candidate, placement: ModulePlacement, rank: int) -> RankMemory:
    """Return terms and peak of one pipeline rank."""
    profile, layout = candidate.profile, candidate.layout
    measurement = point_of(profile, layout)
    assert measurement is not None
    (memory,) = memory_of_ranks(
        profile,
        layout,
        placed_blocks(profile.model, measurement, placement),
        program_of_peaks(layout.program_sizes(candidate.num_microbatches)),
        candidate.limit_bytes,
        boundary_bytes(profile.model, measurement, placement),
        measurement,
        only_rank=rank,
    )
    return memory
