"""Which link each group uses, checked against the ranks that Megatron's order gives the group."""

from __future__ import annotations

from itertools import product

import pytest
from small_profile import block

from mindspeed_autoparallel.cost.collectives import (
    all_gather_us,
    all_reduce_us,
    boundary_link,
    data_parallel_link,
    embedding_link,
    p2p_us,
    reduce_scatter_us,
)
from mindspeed_autoparallel.cost.memory import PlacedBlock
from mindspeed_autoparallel.cost.step import post_pipeline_time
from mindspeed_autoparallel.profiles import Collective, DeviceCost, LinkTier
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.units import MIB

DEVICE = DeviceCost(
    memory_capacity_bytes=2**40,
    intra=LinkTier(default=Collective(latency_us=5.0, bytes_per_s=100e9)),
    inter=LinkTier(
        default=Collective(latency_us=20.0, bytes_per_s=10e9),
        operations={"reduce_scatter": Collective(latency_us=30.0, bytes_per_s=8e9)},
    ),
    optimizer_step_us_per_byte=1e-6,
    optimizer_step_fixed_us=7.0,
)
LAYOUTS = [
    (Layout(tensor_size=t, context_size=c, data_size=d, pipeline_size=p), Cluster(num_nodes=n, devices_per_node=g))
    for t, c, d, p in product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4))
    for n, g in ((1, 8), (2, 4), (2, 8), (4, 4), (4, 8), (8, 4))
    if t * c * d * p == n * g
]


def _ranks(layout: Layout, stage: int) -> list[int]:
    """Global ranks of a pipeline stage: tensor fastest, then context, data, pipeline."""
    size = layout.tensor_size * layout.context_size * layout.data_size
    return list(range(stage * size, (stage + 1) * size))


@pytest.mark.parametrize(("layout", "cluster"), LAYOUTS)
def test_links_follow_the_ranks(layout: Layout, cluster: Cluster) -> None:
    def node(rank: int) -> int:
        return rank // cluster.devices_per_node

    replicas = [
        [rank for rank in _ranks(layout, stage) if rank % layout.tensor_size == lane]
        for stage in range(layout.pipeline_size)
        for lane in range(layout.tensor_size)
    ]
    crosses = any(len({node(rank) for rank in group}) > 1 for group in replicas)
    assert data_parallel_link(layout, cluster, DEVICE) is (DEVICE.inter if crosses else DEVICE.intra)
    for stage in range(layout.pipeline_size - 1):
        pairs = zip(_ranks(layout, stage), _ranks(layout, stage + 1), strict=True)
        crosses = any(node(sender) != node(receiver) for sender, receiver in pairs)
        assert boundary_link(layout, cluster, DEVICE, stage) is (DEVICE.inter if crosses else DEVICE.intra)
    ends = zip(_ranks(layout, 0), _ranks(layout, layout.pipeline_size - 1), strict=True)
    crosses = any(node(first) != node(last) for first, last in ends)
    assert embedding_link(layout, cluster, DEVICE) is (DEVICE.inter if crosses else DEVICE.intra)


def test_the_last_chunk_of_a_rank_sends_to_the_first_rank() -> None:
    layout, cluster = (
        Layout(pipeline_size=4, virtual_size=2, schedule="interleaved"),
        Cluster(num_nodes=2, devices_per_node=2),
    )
    links = [boundary_link(layout, cluster, DEVICE, boundary) is DEVICE.inter for boundary in range(7)]
    assert links == [False, True, False, True, False, True, False]


def test_times_by_hand() -> None:
    link = DEVICE.intra
    assert p2p_us(1e6, link) == pytest.approx(5 + 10)
    assert all_gather_us(8e6, 4, link) == pytest.approx(3 * 5 + 3 / 4 * 80)
    assert all_reduce_us(8e6, 4, link) == pytest.approx(2 * all_gather_us(8e6, 4, link))
    assert reduce_scatter_us(8e6, 2, DEVICE.inter) == pytest.approx(30 + 500)
    assert all_reduce_us(8e6, 1, link) == 0.0


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (4, 1)])
def test_reduction_gathering_and_optimizer_by_hand(nodes: int, per_node: int) -> None:
    cluster, held = Cluster(num_nodes=nodes, devices_per_node=per_node), [PlacedBlock(name="m layer", cost=block(10.0))]
    link = DEVICE.intra if nodes == 1 else DEVICE.inter
    # 4 MiB of gradients, 2 MiB of parameters (tests/helpers/small_profile.py).
    reduce_us, gather_us = reduce_scatter_us(4 * MIB, 4, link), all_gather_us(2 * MIB, 4, link)
    tail = post_pipeline_time(held, Layout(data_size=4), cluster, DEVICE)
    assert tail.data_parallel_us == pytest.approx(reduce_us + gather_us)
    assert tail.optimizer_us == pytest.approx(7 + 1e-6 * MIB / 2)
    whole = post_pipeline_time(held, Layout(data_size=4, distributed_optimizer=False), cluster, DEVICE)
    assert whole.data_parallel_us == pytest.approx(all_reduce_us(4 * MIB, 4, link))
    assert whole.optimizer_us == pytest.approx(7 + 1e-6 * 2 * MIB)
