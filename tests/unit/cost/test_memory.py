"""Peaks found at the right program point, with terms that add up."""

from dataclasses import replace

import pytest

from mindspeed_autoparallel.cost.collectives import (
    all_gather_us,
    all_reduce_us,
    boundary_link,
    data_parallel_link,
    p2p_us,
)
from mindspeed_autoparallel.cost.memory import PlacedBlock, Traffic, mindspeed_stage_bytes, rank_peak
from mindspeed_autoparallel.profiles import (
    BlockCost,
    Collective,
    DeviceCost,
    LinkTier,
    RecomputeCost,
    SharedBytes,
    StateBytes,
)
from mindspeed_autoparallel.schedule import in_flight, make_program
from mindspeed_autoparallel.spec import Cluster, Layout

INTRA = LinkTier(default=Collective(latency_us=1.0, bytes_per_s=1e9))
INTER = LinkTier(default=Collective(latency_us=5.0, bytes_per_s=1e8))
DEVICE = DeviceCost(memory_capacity_bytes=10**9, runtime_overhead_bytes=7, intra=INTRA, inter=INTER)
STATE = StateBytes(num_parameters=5, parameter_bytes=10, gradient_bytes=20, optimizer_bytes=60)


def block(name: str, kind: str = "none") -> PlacedBlock:
    cost = BlockCost(
        forward_us=1.0,
        backward_us=2.0,
        dense=STATE,
        recompute={
            "none": RecomputeCost(saved_bytes=100, forward_peak_bytes=5, backward_peak_bytes=30),
            "full": RecomputeCost(saved_bytes=10, extra_backward_us=1.0, backward_peak_bytes=140),
        },
    )
    return PlacedBlock(name=name, cost=cost, kind=kind)


def test_peak_is_the_last_blocks_backward_while_earlier_microbatches_wait() -> None:
    program = make_program("1f1b", 4, 8)
    peak = rank_peak([[block("a"), block("b")]], program[0], Layout(data_size=2), DEVICE)
    # Static 2 x (10 + 20 + 30); four microbatches of 200 in flight; transient 30; overhead 7.
    assert peak.peak_bytes == 120 + 4 * 200 + 30 + 7
    assert peak.point == "backward of b"
    assert sum(peak.terms.values()) == peak.peak_bytes


def test_a_recomputed_layer_peaks_by_its_recomputed_activations() -> None:
    program = make_program("1f1b", 1, 4)
    peak = rank_peak([[block("a", "full"), block("b")]], program[0], Layout(), DEVICE)
    # At b: 110 saved + 30; at a: 10 saved + 140: a is higher.
    assert peak.point == "backward of a"
    assert peak.terms["this_microbatch"] + peak.terms["transient"] == 150


def test_interleaved_chunks_count_separately() -> None:
    program = make_program("interleaved", 2, 4, 2)
    peak = rank_peak([[block("a")], [block("b")]], program[0], Layout(), DEVICE)
    assert peak.peak_bytes == 2 * 90 + in_flight(program)[0] * 100 + 30 + 7


def test_messages_of_a_middle_stage_as_megatron_keeps_them() -> None:
    program = make_program("1f1b", 4, 8)
    passing = Traffic(received_bytes=7, sent_bytes=3)
    peak = rank_peak([[block("a"), block("b")]], program[1], Layout(), DEVICE, [passing])
    # Three in flight keep what they received, not what they sent; the backward before left its gradient (7).
    assert peak.point == "backward of b"
    assert peak.peak_bytes == 180 + 3 * (200 + 7 - 3) + 30 + 7 + 7
    assert sum(peak.terms.values()) == peak.peak_bytes


def test_messages_of_an_interleaved_last_rank_as_megatron_keeps_them() -> None:
    program, layout = make_program("interleaved", 2, 4, 2), Layout(pipeline_size=2, virtual_size=2)
    traffic = [Traffic(received_bytes=7, sent_bytes=7), Traffic(received_bytes=7)]
    chunks = [[block("a")], [block("b")]]
    peak, blocking = (
        rank_peak(chunks, program[1], layout, DEVICE, traffic, rank=1, sends=sends) for sends in ("freed", "blocking")
    )
    # Two others in flight. Of messages: with their gradients what came last in the warm-up and what the other chunk was
    # given last; the gradient sent before, the output not freed yet, the next input. The block's own output is gone.
    assert peak.point == "backward of a"
    assert peak.peak_bytes == 180 + 2 * 100 + (7 + 100 + 30 - 7) + 7 * 7 + 7
    assert sum(peak.terms.values()) == peak.peak_bytes
    # Nothing is received ahead, and no variable stays behind.
    assert blocking.peak_bytes == peak.peak_bytes - 3 * 7


def test_a_recomputed_last_layer_brings_its_sent_output_back() -> None:
    program = make_program("1f1b", 2, 4)
    free, passing = (
        rank_peak([[block("a", "full")]], program[0], Layout(), DEVICE, [Traffic(sent_bytes=size)]).peak_bytes
        for size in (0, 3)
    )
    # Two in flight: only the other microbatch's output is gone while this one's is there again.
    assert passing == free - 3


def test_side_inputs_live_through_the_forward_and_longer_where_kept_or_recomputed() -> None:
    def peak(kind: str, kept: int) -> int:
        side = SharedBytes(total_bytes=50, kept_bytes=kept)
        blocks = [replace(block(f"m {index}", kind), side=side) for index in range(2)]
        return rank_peak([blocks], make_program("1f1b", 1, 2)[0], Layout(), DEVICE).peak_bytes

    plain = 180 + 200 + 30 + 7
    # The forward's end stands on 200 + 5 + 50, the backward on 200 + 30.
    assert peak("none", 0) == plain - 30 + 55
    assert peak("none", 50) == plain + 50
    assert peak("full", 0) == 180 + 20 + 140 + 50 + 7


def test_the_batch_adds_to_all_other_bytes_during_a_forward() -> None:
    passing = Traffic(batch_bytes=1000)
    peak = rank_peak([[block("a")]], make_program("1f1b", 1, 2)[0], Layout(), DEVICE, [passing])
    assert (peak.point, peak.peak_bytes) == ("forward of a", 90 + 100 + 5 + 1000 + 7)


def test_mindspeed_rule_as_in_its_formula() -> None:
    terms = mindspeed_stage_bytes([block("a", "full"), block("b")], 3, Layout(distributed_optimizer=False))
    assert sum(terms.values()) == 180 + 110 * 2 + 200


def test_ring_times() -> None:
    assert p2p_us(1e6, INTRA) == pytest.approx(1001.0)
    assert all_reduce_us(1e6, 4, INTRA) == pytest.approx(2 * (3 + 750.0))
    assert all_gather_us(1e6, 1, INTRA) == 0.0


def test_groups_that_straddle_a_node_use_the_slow_link() -> None:
    cluster = Cluster(num_nodes=2, devices_per_node=8)
    layout = Layout(pipeline_size=4, tensor_size=2, data_size=2)
    assert data_parallel_link(layout, cluster, DEVICE) is INTRA
    assert boundary_link(layout, cluster, DEVICE, 0) is INTRA
    assert boundary_link(layout, cluster, DEVICE, 1) is INTER
    assert data_parallel_link(Layout(tensor_size=2, data_size=8), cluster, DEVICE) is INTER
