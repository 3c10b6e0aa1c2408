"""Times of stages and ranks in nanoseconds, as the schedule's simulator takes them: blocks, and what comes beside."""

from __future__ import annotations

from mindspeed_autoparallel.cost.buckets import RankTimes
from mindspeed_autoparallel.cost.collectives import data_parallel_link
from mindspeed_autoparallel.cost.memory import PlacedBlock
from mindspeed_autoparallel.cost.sharding import passes_us, units_of
from mindspeed_autoparallel.profiles import BlockCost, DeviceCost
from mindspeed_autoparallel.schedule import SimulatedStep
from mindspeed_autoparallel.spec import Cluster, Layout

NS_PER_US = 1000


def block_times_ns(block: BlockCost, factor: float = 1.0, kind: str = "none") -> tuple[int, int]:
    """Return forward and backward of one block in nanoseconds, recomputation of ``kind`` included."""
    backward = round(block.backward_us * NS_PER_US * factor)
    return (
        round(block.forward_us * NS_PER_US * factor),
        backward + round(block.recompute[kind].extra_backward_us * NS_PER_US * factor),
    )


def block_ns(block: BlockCost, factor: float = 1.0, kind: str = "none") -> int:
    """Return forward plus backward of one block in nanoseconds."""
    return sum(block_times_ns(block, factor, kind))


def stage_times_ns(blocks: list[list[PlacedBlock]], factors: dict[str, float]) -> tuple[list[int], list[int]]:
    """Return forwards and backwards of virtual stages; ``factors``: of a module's time, where data varies."""
    forward, backward = [], []
    for held in blocks:
        pairs = [block_times_ns(block.cost, factors.get(block.module, 1.0), block.kind) for block in held]
        forward.append(sum(pair[0] for pair in pairs))
        backward.append(sum(pair[1] for pair in pairs))
    return forward, backward


def cut_ns(device: DeviceCost, layout: Layout) -> list[int]:
    """Return by virtual stage what being cut adds to a forward, and to a backward."""
    number = layout.num_virtual_stages
    if layout.pipeline_size == 1:
        return [0] * number
    return [round(device.stage_overhead.at(v, number) * NS_PER_US / 2) for v in range(number)]


def per_operation_ns(device: DeviceCost) -> int:
    """Return what the host adds to every operation."""
    return round(device.operation_overhead_us * NS_PER_US)


def beside_blocks_ns(device: DeviceCost, layout: Layout) -> list[int]:
    """Return by virtual stage what the host adds to a forward, and to a backward, whatever blocks the stage holds."""
    return [per_operation_ns(device) + cut for cut in cut_ns(device, layout)]


def sharded_times_ns(
    blocks: list[PlacedBlock], factors: dict[str, float], layout: Layout, cluster: Cluster, device: DeviceCost
) -> tuple[list[int], list[int]]:
    """Return times of the one stage, with what shows of gathering parameters and reducing gradients."""
    assert layout.sharding is not None
    pairs = [block_times_ns(block.cost, factors.get(block.module, 1.0), block.kind) for block in blocks]
    times = [(forward / NS_PER_US, backward / NS_PER_US) for forward, backward in pairs]
    units = units_of(blocks, times, layout, data_parallel_link(layout, cluster, device))
    forward_us, backward_us = passes_us(blocks, units, layout.sharding, device.hidden_share)
    return [round(forward_us * NS_PER_US)], [round(backward_us * NS_PER_US)]


def rank_times(forward: list[int], backward: list[int], simulated: SimulatedStep) -> list[RankTimes]:
    """Return times of pipeline ranks in microseconds."""
    size = len(simulated.starts)
    return [
        RankTimes(
            forward_us=[time / NS_PER_US for time in forward[rank::size]],
            backward_us=[time / NS_PER_US for time in backward[rank::size]],
            before_us=simulated.starts[rank] / NS_PER_US,
            after_us=(simulated.step_time - simulated.finishes[rank]) / NS_PER_US,
        )
        for rank in range(size)
    ]


def times_by_module_ns(blocks: list[PlacedBlock]) -> dict[str, tuple[int, int]]:
    """Return forward and backward of blocks by module."""
    total: dict[str, tuple[int, int]] = {}
    for block in blocks:
        before, (forward, backward) = total.get(block.module, (0, 0)), block_times_ns(block.cost, kind=block.kind)
        total[block.module] = (before[0] + forward, before[1] + backward)
    return total
