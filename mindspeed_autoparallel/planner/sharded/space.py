"""Sizes and switches of a sharded training that the host accepts and the profile has costs for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.planner.sharded.buckets import unit_choices
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.profiles.sharded import CostPoint
from mindspeed_autoparallel.spec.sharded import MEGATRON_FSDP, GroupChoice, ShardedDecisions, ShardSizes


@dataclass(frozen=True)
class Switches:
    """The decisions for the whole model, except sizes and policies."""

    reshard: bool = True
    prefetch: int = 0
    loss_chunk: int = 0
    micro_batch_chunk: int = 0
    offload_optimizer: bool = False
    unit_elements: int = 0


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def sizes_of(problem: Problem, num_devices: int, global_batch: int) -> Iterator[ShardSizes]:
    """Yield every choice of sizes, in a fixed order."""
    profile, host = problem.profile, problem.host
    points = sorted({costs.at for kind in profile.kinds.values() for costs in kind.costs}, key=str)
    for point in points:
        context = point.ulysses_size * point.ring_size
        if num_devices % context or not _allowed(problem, point):
            continue
        samples = point.micro_batch_size * (num_devices // context)
        if global_batch % samples:
            continue
        accumulation = global_batch // samples
        shards = [size for size in _divisors(num_devices) if size % context == 0]
        for shard in shards if host.hybrid_shard else [num_devices]:
            if point.expert_size > 1 and num_devices % point.expert_size:
                continue
            for spread in _expert_shards(num_devices, shard, point.expert_size):
                yield ShardSizes(
                    **vars(point),
                    num_devices=num_devices,
                    fully_shard_size=shard,
                    expert_shard_size=spread,
                    accumulation=accumulation,
                )


def _allowed(problem: Problem, point: CostPoint) -> bool:
    profile, host = problem.profile, problem.host
    return (
        (host.ulysses or point.ulysses_size == 1)
        and (host.ring or point.ring_size == 1)
        and (host.expert_parallel or point.expert_size == 1)
        and all(heads % point.ulysses_size == 0 for heads in profile.attention_heads)
        and (point.expert_size == 1 or (profile.num_experts > 0 and profile.num_experts % point.expert_size == 0))
    )


def _expert_shards(num_devices: int, shard: int, expert_size: int) -> list[int]:
    """Return the sizes of the experts' shards: over all devices, as hosts default to, or inside one replica."""
    if expert_size == 1:
        return [1]
    whole = num_devices // expert_size
    inside = shard // expert_size if shard % expert_size == 0 else whole
    return sorted({whole, inside}, reverse=True)


def switches_of(problem: Problem, sizes: ShardSizes, *, offload_optimizer: bool) -> list[Switches]:
    """Return all combinations of switches at ``sizes``, the most promising first."""
    host, micro = problem.host, sizes.micro_batch_size
    parts = [0, *(size for size in host.micro_batch_chunks if 0 < size < micro and micro % size == 0)]
    # The smallest chunk of the loss holds the least memory, and all chunk sizes take equally long.
    smallest = [min((size for size in host.loss_chunks if size), default=0)]
    chunks = dict.fromkeys([0, *(smallest if problem.profile.head is not None else [])])
    units = unit_choices(problem) if host.variant == MEGATRON_FSDP else [0]
    return [
        Switches(
            reshard=reshard,
            prefetch=prefetch,
            loss_chunk=chunk,
            micro_batch_chunk=part,
            offload_optimizer=offload_optimizer,
            unit_elements=unit,
        )
        for part, chunk, prefetch, reshard, unit in itertools.product(
            parts, chunks, host.prefetch_depths, host.reshard_choices, units
        )
    ]


def lowest_of(rows: Sequence[Switches]) -> list[Switches]:
    """Return those of ``rows`` with the lowest bounds, which fall with the prefetch depth and with a chunked loss."""
    deepest, chunk = max(one.prefetch for one in rows), max(one.loss_chunk for one in rows)
    return [one for one in rows if (one.prefetch, one.loss_chunk) == (deepest, chunk)]


def decided(shipped: ShardedDecisions, problem: Problem, sizes: ShardSizes, switches: Switches) -> ShardedDecisions:
    """Return the decisions of ``sizes`` and ``switches``, with modules wrapped as shipped.

    Prefetch lists follow the order of the groups; with prefetching, groups are in the order of forward.
    """
    groups = list(shipped.groups)
    if switches.prefetch:
        order = list(dict.fromkeys(module.pattern for module in problem.profile.modules))
        groups.sort(key=lambda group: order.index(group.pattern) if group.pattern in order else len(order))
    return ShardedDecisions(
        sizes=sizes,
        groups=tuple(_choice(group, switches, problem.host.root_stays) for group in groups),
        loss_chunk=switches.loss_chunk,
        micro_batch_chunk=switches.micro_batch_chunk,
        chunked=shipped.chunked,
        hooks=shipped.hooks,
        offload_optimizer=switches.offload_optimizer,
        unit_elements=switches.unit_elements,
    )


def _choice(group: GroupChoice, switches: Switches, root_stays: bool) -> GroupChoice:
    return replace(
        group,
        reshard_after_forward=switches.reshard and not (root_stays and not group.pattern),
        forward_prefetch=switches.prefetch,
        backward_prefetch=switches.prefetch,
    )
