"""What hides, by hand and against schedules drawn out."""

import pytest

from mindspeed_autoparallel.cost.overlap import (
    ATTENTION,
    EXPERTS,
    LayerShape,
    Offload,
    layer_saving_us,
    offloaded,
    pair_saving_us,
    pair_savings_us,
    pipelined_saving_us,
)
from mindspeed_autoparallel.cost.placed import PlacedBlock
from mindspeed_autoparallel.profiles import BlockCost, RecomputeCost

MI = 1024 * 1024


def two_stations(first_us, second_us, num_chunks):
    """When the second station is done with the last chunk; each takes one chunk at a time."""
    first = second = 0.0
    for _ in range(num_chunks):
        first += first_us / num_chunks
        second = max(first, second) + second_us / num_chunks
    return second


@pytest.mark.parametrize("num_chunks", [1, 2, 4, 8])
@pytest.mark.parametrize("times_us", [(100.0, 40.0), (40.0, 100.0), (50.0, 50.0), (80.0, 0.0)])
def test_chunks_of_a_product_and_its_collective_pass_each_other(times_us, num_chunks):
    first_us, second_us = times_us
    saving = pipelined_saving_us(first_us, second_us, num_chunks)
    assert sum(times_us) - saving == pytest.approx(two_stations(first_us, second_us, num_chunks))


def test_each_exchange_hides_behind_the_other_directions_computing():
    ahead, behind = placed("layer 0", 30 + 50, 0, exchange_us=50), placed("layer 1", 0, 45 + 20, exchange_us=20)
    assert layer_saving_us(ahead, behind) == 45 + 20


def test_the_attentions_output_is_moved_twice_and_freed_once():
    shape = LayerShape(query=4 * MI, key_value=2 * MI)
    assert offloaded(shape, ATTENTION) == Offload(moved_bytes=2 * (12 + 4) * MI, freed_bytes=2 * 12 * MI)
    # Without the projection, whose input it is, the output stays.
    assert offloaded(shape, ["core_attn"]) == Offload(moved_bytes=2 * 12 * MI, freed_bytes=2 * 8 * MI)


def test_small_tensors_stay():
    shape = LayerShape(query=4 * MI, key_value=MI - 1, expert_input=MI - 1, expert_hidden=8 * MI, element_bytes=4)
    assert offloaded(shape, ATTENTION) == Offload(moved_bytes=4 * 12 * MI, freed_bytes=4 * 8 * MI)
    assert offloaded(shape, EXPERTS) == Offload(moved_bytes=4 * 8 * MI, freed_bytes=4 * 8 * MI)
    assert offloaded(LayerShape(query=1, key_value=1), ATTENTION) == Offload(moved_bytes=0, freed_bytes=0)


def placed(name, forward_us, backward_us, exchange_us=0.0):
    cost = BlockCost(
        forward_us=forward_us,
        backward_us=backward_us,
        forward_exchange_us=exchange_us,
        backward_exchange_us=exchange_us,
        recompute={"none": RecomputeCost(saved_bytes=0)},
    )
    return PlacedBlock(name=f"text_decoder {name}", cost=cost)


def test_layers_pair_first_with_last_and_what_is_left_over_saves_nothing():
    dense, experts = placed("layer 0", 10, 20), placed("layer 1", 50, 70, exchange_us=30)
    # Beside each other: 30 of the forward behind 40, of the backward 20 behind 20.
    assert pair_saving_us([experts], [experts]) == 30 + 20
    # The dense layer's forward hides 10 of the backward's exchange; it has none itself.
    assert pair_saving_us([dense], [experts]) == 10
    assert pair_saving_us([experts], [dense]) == 20
    # The first runs beside the last: dense beside experts, experts beside dense.
    assert pair_saving_us([dense, experts], [dense, experts]) == 10 + 20
    assert pair_saving_us([experts, experts, experts], [experts]) == 50
    assert pair_saving_us([placed("pre", 5, 5), experts], [experts, placed("post", 90, 90)]) == 50


def test_pairs_are_of_chunks_of_one_rank():
    stages = [[placed(f"layer {v}", 50, 70, exchange_us=30)] for v in range(4)]
    assert set(pair_savings_us(stages, 2)) == {(0, 0), (0, 2), (2, 0), (2, 2), (1, 1), (1, 3), (3, 1), (3, 3)}
