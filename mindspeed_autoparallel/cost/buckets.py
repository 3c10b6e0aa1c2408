"""Gradients reduced in buckets while the backward runs, parameters gathered while the next forward does: S4 and S5.

As Megatron's ``DistributedDataParallel`` does it: only the first chunk of the first pipeline stage is cut into buckets,
every other chunk is one. A bucket's reduction begins when the backward has all its gradients, so the last one always
shows, unless the stages before still run. Gathering begins after the optimizer, in the order of the forward, and shows
where a layer waits for its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.cost.collectives import all_gather_us, all_reduce_us, reduce_scatter_us
from mindspeed_autoparallel.cost.placed import PlacedBlock
from mindspeed_autoparallel.cost.step import PostPipelineTime, post_pipeline_time
from mindspeed_autoparallel.cost.topology import data_parallel_link
from mindspeed_autoparallel.profiles import DeviceCost, LinkTier, StateBytes
from mindspeed_autoparallel.spec import Cluster, Layout

_LEAST_BUCKET, _BUCKET_PER_REPLICA = 40_000_000, 1_000_000
_ENDLESS_US = 1e15


def megatron_bucket_elements(num_replicas: int) -> int:
    """Return parameters per bucket where nobody says how many: more with many ranks, whose rings cut them small."""
    return max(_LEAST_BUCKET, _BUCKET_PER_REPLICA * num_replicas)


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """One microbatch on a pipeline rank, in microseconds."""

    forward_us: Sequence[float]
    """By chunk."""
    backward_us: Sequence[float]
    forward_before_us: float = 0.0
    """Through all stages before, before the rank's first forward can begin."""
    backward_before_us: float = 0.0
    """Back through all stages before, after the rank's last backward."""


def bucketed_tails(
    ranks: Sequence[Sequence[Sequence[PlacedBlock]]],
    times: Sequence[RankTimes],
    layout: Layout,
    cluster: Cluster,
    device: DeviceCost,
) -> tuple[tuple[PostPipelineTime, ...], PostPipelineTime]:
    """Return what shows of every rank, and of the step: all ranks wait for each other before the optimizer (gradient
    norm).

    ``ranks``: the blocks of every rank by chunk.
    """
    link = data_parallel_link(layout, cluster, device)
    reductions, tails = [], []
    for rank, (chunks, own) in enumerate(zip(ranks, times, strict=True)):
        reductions.append(_reduction_us(chunks, own, layout, link, cut=rank == 0))
        gathering_us = _gathering_us(chunks, own, layout, link, cut=rank == 0)
        optimizer_us = post_pipeline_time(
            [block for chunk in chunks for block in chunk], layout, cluster, device
        ).optimizer_us
        tails.append(PostPipelineTime(data_parallel_us=gathering_us, optimizer_us=optimizer_us))
    last = max(tails, key=lambda tail: tail.total_us)
    step = PostPipelineTime(data_parallel_us=max(reductions) + last.data_parallel_us, optimizer_us=last.optimizer_us)
    return tuple(
        PostPipelineTime(data_parallel_us=reduction + tail.data_parallel_us, optimizer_us=tail.optimizer_us)
        for reduction, tail in zip(reductions, tails, strict=True)
    ), step


def least_tail_us(
    everything: Sequence[PlacedBlock],
    first: Sequence[PlacedBlock],
    layout: Layout,
    cluster: Cluster,
    device: DeviceCost,
) -> float:
    """Return a time below every placement's tail. ``first``: what the first rank holds in any case.

    The first rank's last backward ends the pipeline and its first forward begins it, so nothing of its collectives
    hides but by overlap, which leaves a bucket of each: of all it holds where that is one bucket, else of more than
    half a bucket. Some rank's optimizer has an even share of all.
    """
    link = data_parallel_link(layout, cluster, device)
    share = post_pipeline_time(list(everything), layout, cluster, device).optimizer_us / layout.pipeline_size
    own = post_pipeline_time(list(first), layout, cluster, device).optimizer_us
    endless = _ENDLESS_US if layout.overlap_gradient_reduce else 0.0
    times = RankTimes(forward_us=[endless], backward_us=[endless])
    best = replace(layout, overlap_parameter_gather=layout.overlap_gradient_reduce)
    cut = layout.pipeline_size == 1
    if not cut and 2 * sum(s.num_parameters for block in first for s in _states(block)) > layout.bucket_elements:
        first = []
    gathering_us = _gathering_us([first], times, best, link, cut=cut)
    return _reduction_us([first], times, best, link, cut=cut) + max(share, own + gathering_us)


def _reduction_us(
    chunks: Sequence[Sequence[PlacedBlock]], times: RankTimes, layout: Layout, link: LinkTier, *, cut: bool
) -> float:
    finished = float("-inf")
    for chunk in reversed(range(len(chunks))):
        end = -sum(times.backward_us[:chunk])
        for states, group in _buffers(chunks[chunk], layout):
            size = sum(state.gradient_bytes for state in states)
            number = _num_buckets(states, layout, cut=cut and chunk == 0)
            for bucket in range(number):
                ready = 0.0
                if layout.overlap_gradient_reduce:
                    ready = end - times.backward_us[chunk] * (1 - (bucket + 1) / number)
                collective = reduce_scatter_us if layout.distributed_optimizer else all_reduce_us
                finished = max(finished, ready) + collective(size / number, group, link)
    return max(0.0, finished - times.backward_before_us)


def _gathering_us(
    chunks: Sequence[Sequence[PlacedBlock]], times: RankTimes, layout: Layout, link: LinkTier, *, cut: bool
) -> float:
    if not layout.distributed_optimizer:
        return 0.0
    finished = late = needed = 0.0
    for chunk, blocks in enumerate(chunks):
        for states, group in _buffers(blocks, layout):
            size = sum(state.parameter_bytes for state in states)
            number = _num_buckets(states, layout, cut=cut and chunk == 0) if layout.overlap_parameter_gather else 1
            for bucket in range(number):
                finished += all_gather_us(size / number, group, link)
                late = max(late, finished - needed - times.forward_us[chunk] * bucket / number)
        # The next chunk's first forward comes after one of this chunk for every stage.
        needed += layout.pipeline_size * times.forward_us[chunk]
    if not layout.overlap_parameter_gather:
        late = finished
    return max(0.0, late - times.forward_before_us)


def _buffers(blocks: Sequence[PlacedBlock], layout: Layout) -> list[tuple[list[StateBytes], int]]:
    """Return trained state by the group that reduces it."""
    replicas = layout.data_size * layout.context_size
    by_group = zip(*map(_states, blocks), strict=True)
    trained = [[state for state in states if state.gradient_bytes] for states in by_group]
    groups = zip(trained, (replicas, layout.expert_replicas), strict=False)
    return [(states, group) for states, group in groups if states and group > 1]


def _states(block: PlacedBlock) -> tuple[StateBytes, StateBytes]:
    return block.cost.dense, block.cost.expert


def _num_buckets(states: Sequence[StateBytes], layout: Layout, *, cut: bool) -> int:
    if not cut or not layout.overlap_gradient_reduce:
        return 1
    return max(1, -(-sum(state.num_parameters for state in states) // layout.bucket_elements))
