"""Few layouts are measured whole, and they lie around the others."""

import itertools

from mindspeed_autoparallel.planner.tuner.anchors import MAX_ANCHORS, choose
from mindspeed_autoparallel.profiles import MeasuredAt


def space(tensor_sizes, batches, experts=(1,)):
    return [
        MeasuredAt(tensor_size=tensor, micro_batch_size=batch, sequence_parallel=split, expert_size=expert)
        for tensor, batch, expert in itertools.product(tensor_sizes, batches, experts)
        for split in ((False, True) if tensor > 1 else (False,))
    ]


def test_every_sharding_has_both_ends_before_any_has_a_middle():
    chosen = choose(space((1, 2), (1, 2, 3, 4, 8)))
    shardings = {(point.tensor_size, point.sequence_parallel) for point in chosen}
    assert shardings == {(1, False), (2, False), (2, True)}
    for tensor, split in shardings:
        batches = {p.micro_batch_size for p in chosen if (p.tensor_size, p.sequence_parallel) == (tensor, split)}
        assert {1, 8} <= batches <= {1, 3, 8}
    assert len(chosen) == MAX_ANCHORS


def test_the_farthest_apart_of_many_shardings_are_chosen():
    chosen = choose(space((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)))
    assert len(chosen) == MAX_ANCHORS
    assert {1, 8} <= {point.tensor_size for point in chosen}
    assert {1, 4} <= {point.expert_size for point in chosen}
    assert {False, True} == {point.sequence_parallel for point in chosen}


def test_a_single_layout_is_measured_once():
    only = MeasuredAt(micro_batch_size=2)
    assert choose([only]) == [only]
    assert choose([]) == []
