"""Layouts between those that were measured whole get a factor between theirs; others that of the nearest."""

import math

import pytest

from mindspeed_autoparallel.planner.tuner.corrections import Corrections, Residual
from mindspeed_autoparallel.profiles import MeasuredAt


def at(batch, tensor=1, sequence_parallel=False, expert=1):
    return MeasuredAt(
        micro_batch_size=batch, tensor_size=tensor, sequence_parallel=sequence_parallel, expert_size=expert
    )


def corrections(*factors):
    return Corrections(
        [
            Residual(block="layer", direction="forward", at=point, log_ratio=math.log(factor))
            for point, factor in factors
        ]
    )


MEASURED = corrections((at(1), 1.0), (at(4), 4.0), (at(1, 2), 3.0), (at(1, 2, True), 5.0))


@pytest.mark.parametrize(
    ("point", "factor"),
    [
        (at(1), 1.0),
        (at(2), 2.0),
        (at(4), 4.0),
        (at(8), 4.0),  # on a line in the logarithms, flat beyond it
        (at(1, 2), 3.0),
        (at(1, 2, True), 5.0),
        (at(4, 2), 3.0),
        (at(1, 8), 3.0),
        (at(2, 4, True), 5.0),
        (at(2, expert=2), 2.0),  # as the nearest sharding
    ],
)
def test_a_layout_gets_the_factor_of_those_around_it(point, factor):
    assert MEASURED.factor("layer", "forward", point) == pytest.approx(factor)


def test_equally_near_shardings_share():
    between = corrections((at(1, 1), 1.0), (at(1, 4), 4.0))
    assert between.factor("layer", "forward", at(1, 2)) == pytest.approx(2.0)


def test_blocks_and_directions_are_apart():
    assert MEASURED.factor("post", "forward", at(1)) == 1.0
    assert MEASURED.factor("layer", "backward", at(1)) == 1.0


def test_the_error_leaves_each_layout_out():
    assert corrections((at(1), 1.0), (at(2), 2.0), (at(4), 4.0)).left_out_error() == pytest.approx(
        math.log(2) * 2 / 3  # the ends get their neighbour's; the middle one is right
    )
    assert corrections((at(1), 1.0)).left_out_error() is None
