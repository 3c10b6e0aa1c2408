"""Buckets of gradients reduced during the backward, and of parameters gathered during the next forward: S4 and S5.

As in Megatron's ``DistributedDataParallel``, only the first chunk of the first pipeline stage is cut into buckets,
every other chunk is one. A bucket's reduction begins when the backward has all its gradients, so the last one is
always exposed, unless other stages still run. Gathering begins after the optimizer, in the order of the forward, and is
exposed where a layer waits for its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.cost.collectives import all_gather_us, all_reduce_us, data_parallel_link, reduce_scatter_us
from mindspeed_autoparallel.cost.placed import PlacedBlock
from mindspeed_autoparallel.cost.step import PostPipelineTime, post_pipeline_time
from mindspeed_autoparallel.profiles import BlockCost, DeviceCost, LinkTier, StateBytes
from mindspeed_autoparallel.spec import Cluster, Layout

_LEAST_BUCKET, _BUCKET_PER_REPLICA = 40_000_000, 1_000_000
_ENDLESS_US = 1e15


def megatron_bucket_elements(num_replicas: int) -> int:
    """Return Megatron's default number of parameters per bucket; it grows with the ranks that share a bucket."""
    return max(_LEAST_BUCKET, _BUCKET_PER_REPLICA * num_replicas)


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """One microbatch on a pipeline rank, and when the rank begins and ends, in microseconds."""

    forward_us: Sequence[float]
    """By chunk."""
    backward_us: Sequence[float]
    before_us: float = 0.0
    """From the start of the step to the rank's first forward."""
    after_us: float = 0.0
    """From the rank's last backward to the end of the pipeline."""


def in_buckets(layout: Layout, device: DeviceCost) -> bool:
    """Return whether S4 and S5 replace S1: gradients are not sharded, and no model of the nodes' network is given."""
    return layout.sharding is None and device.exchange is None


def step_tails(
    ranks: Sequence[Sequence[Sequence[PlacedBlock]]],
    times: Sequence[RankTimes],
    layout: Layout,
    cluster: Cluster,
    device: DeviceCost,
) -> tuple[tuple[PostPipelineTime, ...], PostPipelineTime]:
    """Return the time of every rank after its own last backward, and the exposed part of it in the step.

    All ranks wait for each other before the optimizer (gradient norm). ``ranks``: the blocks of every rank by chunk.
    """
    held = [[block for chunk in chunks for block in chunk] for chunks in ranks]
    plain = [post_pipeline_time(blocks, layout, cluster, device) for blocks in held]
    if not in_buckets(layout, device):
        return tuple(plain), max(plain, key=lambda tail: tail.total_us)
    link = data_parallel_link(layout, cluster, device)
    tails = tuple(
        replace(
            tail,
            reduce_us=_reduction_us(chunks, own, layout, link, cut=rank == 0),
            gather_us=_gathering_us(chunks, own, layout, link, cut=rank == 0),
        )
        for rank, (chunks, own, tail) in enumerate(zip(ranks, times, plain, strict=True))
    )
    shown_us = max(0.0, *(tail.reduce_us - own.after_us for tail, own in zip(tails, times, strict=True)))
    last = max(tails, key=lambda tail: tail.gather_us + tail.optimizer_us)
    return tails, replace(last, reduce_us=shown_us)


def most_buckets(blocks: Sequence[tuple[BlockCost, int]], layout: Layout) -> int:
    """Return the number of buckets of the larger group if one rank held all ``blocks``, each with its count."""
    sizes = [0, 0]
    for block, number in blocks:
        for group, state in enumerate((block.dense, block.expert)):
            sizes[group] += number * state.num_parameters if state.gradient_bytes else 0
    return max(1, -(-max(sizes) // _bucket_elements(layout)))


def least_tail_us(
    everything: Sequence[PlacedBlock],
    first: Sequence[PlacedBlock],
    layout: Layout,
    cluster: Cluster,
    device: DeviceCost,
) -> float:
    """Return a lower bound on every placement's tail. ``first``: blocks that the first rank holds in every placement.

    The first rank's first forward begins the pipeline and its last backward ends it, so only overlap hides its
    collectives, and it leaves one bucket of each exposed: all parameters if they fit one bucket, else more than half a
    full bucket. Some rank's optimizer updates at least an even share.
    """
    link = data_parallel_link(layout, cluster, device)
    share = post_pipeline_time(list(everything), layout, cluster, device).optimizer_us / layout.pipeline_size
    own = post_pipeline_time(list(first), layout, cluster, device).optimizer_us
    endless = _ENDLESS_US if layout.overlap_gradient_reduce else 0.0
    times = RankTimes(forward_us=[endless], backward_us=[endless])
    best = replace(layout, overlap_parameter_gather=layout.overlap_gradient_reduce)
    cut = layout.pipeline_size == 1
    if not cut and 2 * sum(s.num_parameters for block in first for s in _states(block)) > _bucket_elements(layout):
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
    return max(0.0, finished)


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
        # The next chunk's first forward follows one forward of this chunk per pipeline stage.
        needed += layout.pipeline_size * times.forward_us[chunk]
    if not layout.overlap_parameter_gather:
        late = finished
    return max(0.0, late - times.before_us)


def _buffers(blocks: Sequence[PlacedBlock], layout: Layout) -> list[tuple[list[StateBytes], int]]:
    """Return the trained state by the group that reduces it."""
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
    return max(1, -(-sum(state.num_parameters for state in states) // _bucket_elements(layout)))


def _bucket_elements(layout: Layout) -> int:
    return layout.bucket_elements or megatron_bucket_elements(layout.data_size * layout.context_size)
