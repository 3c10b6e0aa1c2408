"""An encoder's own pipeline replayed: by hand, against the schedule simulator, and where rounds are not replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate
from mindspeed_autoparallel.schedule import encoder_pipeline as pipeline
from mindspeed_autoparallel.schedule.encoder_pipeline import StagedRounds, staged_backward_us, staged_forward_us

TWO = StagedRounds(
    count=3, forward_us=(10.0, 20.0), backward_us=(30.0, 40.0), again_us=(0.0, 0.0), message_us=5.0, outputs_us=7.0
)


def test_forward_by_hand() -> None:
    # Stage 0 sends at 10, through at 15; stage 1 computes 15-35, 40-60, 65-85: it takes the next rows when it is done.
    assert staged_forward_us([replace(TWO, outputs_us=0.0)]) == 85.0
    assert staged_forward_us([TWO]) == 92.0


def test_last_rows_wait_for_the_transfers_before_them() -> None:
    assert staged_forward_us([replace(TWO, outputs_us=100.0)]) == 35.0 + 300.0


def test_inputs_hold_back_the_first_stage() -> None:
    assert staged_forward_us([replace(TWO, count=1, inputs_us=50.0, outputs_us=0.0)]) == 50.0 + 10.0 + 5.0 + 20.0


def test_gradients_hold_back_the_last_stage() -> None:
    alone = staged_backward_us([replace(TWO, count=1)])
    assert alone == 5.0 + 40.0 + 5.0 + 30.0
    assert staged_backward_us([replace(TWO, count=1, gradients_us=50.0)]) == 50.0 + 40.0 + 5.0 + 30.0


times = st.integers(1, 60).map(float)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(1, 12))
def test_backward_is_the_simulators_where_nothing_travels_beside_it(
    data: st.DataObject, stages: int, count: int
) -> None:
    forward, backward = (data.draw(st.tuples(*[times] * stages)) for _ in range(2))
    message = data.draw(times)
    run = StagedRounds(count=count, forward_us=forward, backward_us=backward, again_us=forward, message_us=message)
    step = simulate(
        make_program("1f1b", stages, count),
        StepTimes(forward=forward, backward=backward, link=(message,) * (stages - 1)),
        rendezvous=True,
    )
    assert staged_backward_us([run]) == pytest.approx(step.step_time)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(20, 120), st.booleans())
def test_many_batches_take_what_the_whole_replay_takes(
    data: st.DataObject, stages: int, count: int, rest: bool
) -> None:
    draw = lambda: data.draw(st.tuples(*[times] * stages))
    run = StagedRounds(
        count=count,
        forward_us=draw(),
        backward_us=draw(),
        again_us=draw(),
        message_us=data.draw(times),
        inputs_us=data.draw(times),
        outputs_us=data.draw(times),
        gradients_us=data.draw(times),
    )
    runs = (run, replace(run, count=1, forward_us=draw())) if rest else (run,)
    for found, forward_only in ((staged_forward_us(runs), True), (staged_backward_us(runs), False)):
        whole = pipeline._replayed(runs, forward_only)
        # A transfer that is a little slower than the stages shows late: it is then not in the rounds replayed.
        assert found == pytest.approx(whole, rel=0.05)
