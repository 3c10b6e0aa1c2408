"""Memory mode window replayed: by hand, without encoders, and what its transfers make wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_autoparallel.schedule import SENDS, StepTimes, make_program, simulate
from mindspeed_autoparallel.schedule.window import BackboneTimes, MacroBatchTimes, num_alive, ticks_of, window_step_us

BACKBONE = BackboneTimes(forward_us=[10.0, 12.0], backward_us=[20.0, 25.0], link_us=[1.0], num_microbatches=4)


def batches(scale: int, outputs_us: float = 1.0, gradients_us: float = 1.0) -> list[MacroBatchTimes]:
    count = BACKBONE.num_microbatches
    return [
        MacroBatchTimes(
            first=first,
            last=min(first + scale, count) - 1,
            inputs_us=0.0,
            forward_us=(5.0, 5.0),
            outputs_us=outputs_us,
            gradients_us=gradients_us,
            backward_us=(9.0, 9.0),
        )
        for first in range(0, count, scale)
    ]


def test_without_encoders_it_is_the_pipeline() -> None:
    step = simulate(
        make_program("1f1b", 2, 4),
        StepTimes(forward=BACKBONE.forward_us, backward=BACKBONE.backward_us, link=BACKBONE.link_us),
        rendezvous=True,
    )
    assert window_step_us(BACKBONE, []) == step.step_time


def test_one_batch_of_everything_is_encoded_before_and_taken_back_after() -> None:
    assert window_step_us(BACKBONE, [batches(4)]) == window_step_us(BACKBONE, []) + 5 + 1 + 1 + 9


def test_on_one_stage_everything_adds_up() -> None:
    alone = replace(BACKBONE, forward_us=[10.0], backward_us=[20.0], link_us=[])
    assert window_step_us(alone, [batches(1)]) == 4 * (10 + 20 + 5 + 1 + 1 + 9)


def test_stages_wait_for_one_another_at_every_batch() -> None:
    together = sum(batch.forward_us[0] + batch.backward_us[0] + 2 for batch in batches(1))
    # A sum of pipeline and encoders promises too much: every transfer is a meeting inside the schedule.
    assert window_step_us(BACKBONE, [batches(1)]) > window_step_us(BACKBONE, []) + together


def test_encoders_without_transfers_fill_bubbles() -> None:
    free = batches(1, outputs_us=0.0, gradients_us=0.0)
    assert window_step_us(BACKBONE, [free]) < window_step_us(BACKBONE, [batches(1)])


@pytest.mark.parametrize(
    ("stages", "scale", "alive"), [(1, 1, 1), (1, 4, 1), (2, 1, 2), (4, 3, 2), (4, 1, 4), (2, 4, 2)]
)
def test_batches_alive_at_once(stages: int, scale: int, alive: int) -> None:
    assert num_alive(ticks_of(stages, 8), scale) == alive


@pytest.mark.parametrize("sends", [sends for sends in SENDS if sends != "eager"])
def test_virtual_stages_without_encoders_are_the_pipeline(sends: str) -> None:
    times = StepTimes(forward=[5.0, 6.0, 7.0, 3.0], backward=[9.0, 12.0, 13.0, 8.0], link=[1.0, 2.0, 4.0])
    backbone = BackboneTimes(
        forward_us=times.forward,
        backward_us=times.backward,
        link_us=times.link,
        num_microbatches=6,
        num_chunks=2,
        sends=sends,
    )
    step = simulate(make_program("interleaved", 2, 6, 2), times, sends=sends)
    assert window_step_us(backbone, []) == step.step_time
