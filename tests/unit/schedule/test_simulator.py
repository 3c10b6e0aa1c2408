import random

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule import (
    StepTimes,
    in_flight,
    make_program,
    program_from_text,
    program_to_text,
    simulate,
)

SHAPES = [("1f1b", 1, 3, 1), ("1f1b", 4, 2, 1), ("1f1b", 4, 8, 1), ("gpipe", 3, 5, 1), ("interleaved", 4, 8, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_text_form_round_trips(shape):
    program = make_program(*shape)
    assert program_from_text(program_to_text(program)) == program


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rendezvous", [False, True])
def test_critical_path_adds_up_and_work_is_done_once(shape, rendezvous):
    schedule, stages, microbatches, chunks = shape
    if rendezvous and schedule != "1f1b":
        return
    drawn = random.Random(5)
    for _ in range(40):
        virtual = stages * chunks
        forward = [[drawn.randint(0, 30) for _ in range(microbatches)] for _ in range(virtual)]
        backward = [[drawn.randint(0, 60) for _ in range(microbatches)] for _ in range(virtual)]
        link = [drawn.randint(0, 9) for _ in range(virtual - 1)]
        times = StepTimes(forward=forward, backward=backward, link=link)
        step = simulate(make_program(*shape), times, rendezvous=rendezvous, with_timeline=True)
        assert sum(duration for _, duration in step.critical_path) == step.step_time
        assert sum(step.busy) == sum(map(sum, forward)) + sum(map(sum, backward))
        assert max(end for _, _, _, end in step.timeline) <= step.step_time


def test_one_stage_computes_without_gaps():
    step = simulate(make_program("1f1b", 1, 7), StepTimes(forward=[3], backward=[5]))
    assert step.step_time == 7 * 8


def test_equal_stages_take_the_closed_form():
    step = simulate(make_program("1f1b", 4, 8), StepTimes(forward=[10] * 4, backward=[20] * 4))
    assert step.step_time == (8 + 3) * 30


def test_a_blocked_receiver_delays_the_sender_only_under_rendezvous():
    program = make_program("1f1b", 3, 6)
    times = StepTimes(forward=[[1, 9, 1, 9, 1, 9]] * 3, backward=[[9, 1, 9, 1, 9, 1]] * 3)
    assert simulate(program, times, rendezvous=True).step_time >= simulate(program, times).step_time


def test_in_flight_is_what_1f1b_holds():
    assert in_flight(make_program("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert in_flight(make_program("1f1b", 4, 2)) == (2, 2, 2, 1)
    assert in_flight(make_program("gpipe", 2, 5)) == (5, 5)


@pytest.mark.parametrize(
    "wrong", [("2f2b", 2, 2), ("1f1b", 0, 2), ("1f1b", 2, 0), ("1f1b", 2, 2, 2), ("interleaved", 4, 2, 2)]
)
def test_impossible_shapes_are_named(wrong):
    with pytest.raises(ConfigError):
        make_program(*wrong)


def test_deadlock_is_an_error():
    with pytest.raises(ConfigError, match="deadlocks"):
        simulate(program_from_text("B0.0,F0.0\nF0.0,B0.0\n"), StepTimes(forward=[1, 1], backward=[1, 1]))
