"""What shows of gradient reduction and parameter gathering, by hand."""

from dataclasses import replace

import pytest

from mindspeed_autoparallel.cost.buckets import RankTimes, least_tail_us, megatron_bucket_elements, step_tails
from mindspeed_autoparallel.cost.collectives import all_gather_us, all_reduce_us, reduce_scatter_us
from mindspeed_autoparallel.cost.placed import PlacedBlock
from mindspeed_autoparallel.profiles import BlockCost, Collective, DeviceCost, LinkTier, RecomputeCost, StateBytes
from mindspeed_autoparallel.spec import Cluster, Layout

LINK = LinkTier(default=Collective(latency_us=10.0, bytes_per_s=1e9))
DEVICE = DeviceCost(
    memory_capacity_bytes=10**12, intra=LINK, inter=LINK, optimizer_step_us_per_byte=0.0, optimizer_step_fixed_us=5.0
)
CLUSTER = Cluster(num_nodes=1, devices_per_node=8)
ELEMENTS = 1_000_000
BLOCK = PlacedBlock(
    name="text layer",
    cost=BlockCost(
        forward_us=0.0,
        backward_us=0.0,
        recompute={"none": RecomputeCost(saved_bytes=0)},
        dense=StateBytes(num_parameters=ELEMENTS, parameter_bytes=2 * ELEMENTS, gradient_bytes=4 * ELEMENTS),
    ),
)
BOTH = Layout(data_size=4, overlap_gradient_reduce=True, overlap_parameter_gather=True, bucket_elements=ELEMENTS)
REDUCTION = replace(BOTH, overlap_parameter_gather=False)
NEITHER = replace(REDUCTION, overlap_gradient_reduce=False)


def shown(layout, ranks, times):
    return step_tails(ranks, times, layout, CLUSTER, DEVICE)[1].data_parallel_us


def alone(forward_us, backward_us):
    return [RankTimes(forward_us=[forward_us], backward_us=[backward_us])]


def test_megatrons_buckets_grow_with_the_replicas():
    assert megatron_bucket_elements(8) == 40_000_000
    assert megatron_bucket_elements(512) == 512_000_000


def test_without_overlap_all_of_both_shows():
    held = [[[BLOCK] * 4]]
    reduce_us, gather_us = reduce_scatter_us(16 * ELEMENTS, 4, LINK), all_gather_us(8 * ELEMENTS, 4, LINK)
    assert shown(NEITHER, held, alone(1e9, 1e9)) == pytest.approx(reduce_us + gather_us)
    whole = replace(NEITHER, distributed_optimizer=False)
    assert shown(whole, held, alone(1e9, 1e9)) == pytest.approx(all_reduce_us(16 * ELEMENTS, 4, LINK))


def test_only_the_last_and_the_first_bucket_are_exposed_beside_a_long_backward_and_forward():
    bucket_us, part_us = reduce_scatter_us(4 * ELEMENTS, 4, LINK), all_gather_us(2 * ELEMENTS, 4, LINK)
    assert shown(BOTH, [[[BLOCK] * 4]], alone(1e9, 1e9)) == pytest.approx(bucket_us + part_us)
    # Nothing to hide behind: buckets only add latencies.
    open_us = shown(BOTH, [[[BLOCK] * 4]], alone(0.0, 0.0))
    assert open_us == pytest.approx(4 * (bucket_us + part_us))
    assert open_us > shown(NEITHER, [[[BLOCK] * 4]], alone(0.0, 0.0))


def test_a_bucket_waits_for_its_gradients_and_for_the_link():
    bucket_us = reduce_scatter_us(4 * ELEMENTS, 4, LINK)
    # Of two buckets the first is ready half a backward before the end.
    gather_us = all_gather_us(4 * ELEMENTS, 4, LINK)
    for backward_us in (bucket_us, 4 * bucket_us):
        expected = max(0.0, bucket_us - backward_us / 2) + bucket_us
        assert shown(REDUCTION, [[[BLOCK] * 2]], alone(0.0, backward_us)) == pytest.approx(expected + gather_us)


def test_later_stages_have_one_bucket_and_hide_while_other_stages_run():
    layout = replace(BOTH, pipeline_size=2, data_size=4)
    whole_us, gather_us = reduce_scatter_us(8 * ELEMENTS, 4, LINK), all_gather_us(4 * ELEMENTS, 4, LINK)
    first = RankTimes(forward_us=[1e9], backward_us=[1e9])
    part_us = reduce_scatter_us(4 * ELEMENTS, 4, LINK) + all_gather_us(2 * ELEMENTS, 4, LINK)
    for before_us in (0.0, 1e9):
        last = RankTimes(forward_us=[1e9], backward_us=[1e9], before_us=before_us, after_us=before_us)
        expected = part_us if before_us else whole_us + gather_us
        assert shown(layout, [[[BLOCK] * 2]] * 2, [first, last]) == pytest.approx(expected)


def test_a_chunk_is_reduced_while_the_chunks_before_it_run_backward():
    layout = replace(REDUCTION, virtual_size=2, schedule="interleaved", pipeline_size=1)
    times = [RankTimes(forward_us=[0.0, 0.0], backward_us=[1e9, 0.0])]
    # The second chunk's reduction hides whole, of the first chunk's two buckets the last one shows.
    bucket_us, gather_us = reduce_scatter_us(4 * ELEMENTS, 4, LINK), 2 * all_gather_us(4 * ELEMENTS, 4, LINK)
    assert shown(layout, [[[BLOCK] * 2, [BLOCK] * 2]], times) == pytest.approx(bucket_us + gather_us)


@pytest.mark.parametrize("layout", [BOTH, REDUCTION, NEITHER])
@pytest.mark.parametrize("times", [(0.0, 0.0), (3e3, 7e3), (1e9, 1e9)])
def test_the_bound_is_below_what_shows(layout, times):
    held = [BLOCK] * 4
    _, step = step_tails([[held]], alone(*times), layout, CLUSTER, DEVICE)
    bound = least_tail_us(held, held, layout, CLUSTER, DEVICE)
    assert 0 < bound <= step.total_us * (1 + 1e-12)
    if layout is NEITHER:
        assert bound == pytest.approx(step.total_us)


def test_with_overlap_the_bound_has_the_bucket_that_always_shows():
    held = [BLOCK] * 4
    _, step = step_tails([[held]], alone(1e12, 1e12), BOTH, CLUSTER, DEVICE)
    assert least_tail_us(held, held, BOTH, CLUSTER, DEVICE) == pytest.approx(step.total_us)
