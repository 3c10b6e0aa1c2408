"""Stages of 1F1B that meet once per microbatch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate
from mindspeed_autoparallel.schedule.exchanges import MET, Meet, diagonal_places_of, met_steps, places_of
from mindspeed_autoparallel.schedule.programs import Action


def met_step(num_stages: int, num_microbatches: int, forward: int, backward: int, sends: str = MET) -> float:
    times = StepTimes(
        forward=[forward] * num_stages, backward=[backward] * num_stages, link=[0] * (num_stages - 1), per_operation=0
    )
    return simulate(make_program("1f1b", num_stages, num_microbatches), times, sends=sends).step_time


@given(st.integers(1, 8), st.integers(0, 24), st.integers(1, 5), st.integers(1, 9))
def test_meeting_takes_no_less_time_and_never_stops(stages: int, more: int, forward: int, backward: int) -> None:
    count = stages + more
    assert met_step(stages, count, forward, backward) >= met_step(stages, count, forward, backward, "blocking")


@pytest.mark.parametrize(("stages", "backward", "most"), [(2, 2, 1.35), (4, 2, 1.65), (8, 2, 1.75), (8, 3, 1.8)])
def test_stages_go_on_beside_each_other_between_meetings(stages: int, backward: int, most: float) -> None:
    """One after another, the backwards of a microbatch would make eight stages take four times as long."""
    plain = met_step(stages, 8 * stages, 1, backward, "blocking")
    assert met_step(stages, 8 * stages, 1, backward) < most * plain


@given(st.integers(1, 8), st.integers(0, 24))
def test_the_last_stage_meets_between_forward_and_backward(stages: int, more: int) -> None:
    own = met_steps(stages, stages + more)[-1]
    for index, step in enumerate(own):
        if isinstance(step, Meet):
            behind = own[index + 1]
            assert isinstance(behind, Action)
            assert (behind.kind, behind.microbatch) == ("B", step.microbatch)


@given(st.integers(2, 8), st.integers(0, 24), st.data())
def test_places_are_in_the_order_of_microbatches(stages: int, more: int, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, stages - 2))
    for places in (places_of(stages, stages + more, stage), diagonal_places_of(stages, stages + more, stage)):
        assert len(places) == stages + more
        for kind in ("before_forward", "after_forward", "before_backward"):
            of_kind = [place.microbatch for place in places if place.kind == kind]
            assert of_kind == sorted(of_kind)
            assert all(number < stages + more for number in of_kind)
