import random

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule import SENDS, Action, StepTimes, make_program, simulate
from mindspeed_autoparallel.schedule.messages import Post, Wait, message_steps

INTERLEAVED = [(4, 8, 2, 0), (4, 4, 2, 0), (3, 3, 3, 0), (2, 7, 2, 5), (3, 6, 2, 0)]


def drawn_times(num_virtual, num_microbatches, seed):
    drawn = random.Random(seed)
    return StepTimes(
        forward=[[drawn.randint(1, 30) for _ in range(num_microbatches)] for _ in range(num_virtual)],
        backward=[[drawn.randint(1, 60) for _ in range(num_microbatches)] for _ in range(num_virtual)],
        link=[drawn.randint(0, 9) for _ in range(num_virtual - 1)],
    )


@pytest.mark.parametrize("shape", INTERLEAVED)
@pytest.mark.parametrize("sends", SENDS)
def test_every_message_is_posted_once_by_each_side_and_the_computations_stay(shape, sends):
    stages, microbatches, chunks, group = shape
    program = make_program("interleaved", stages, microbatches, chunks, group)
    steps = message_steps(program, sends)
    assert [[step for step in row if isinstance(step, Action)] for row in steps] == [list(row) for row in program]
    posted = [
        message for row in steps for step in row if not isinstance(step, (Action, Wait)) for message in step.messages
    ]
    assert len(posted) == len(set(posted))
    assert {message.other_side for message in posted} == set(posted)
    expected = 0 if sends == "eager" else 2 * 2 * (stages * chunks - 1) * microbatches
    assert len(posted) == expected


@pytest.mark.parametrize("shape", INTERLEAVED)
@pytest.mark.parametrize("sends", SENDS)
def test_nothing_is_computed_before_its_message_is_through(shape, sends):
    stages, microbatches, chunks, group = shape
    program = make_program("interleaved", stages, microbatches, chunks, group)
    times = drawn_times(stages * chunks, microbatches, 3)
    step = simulate(program, times, sends=sends, with_timeline=True)
    ends = {
        (action.kind, action.chunk * stages + stage, action.microbatch): end for stage, action, _, end in step.timeline
    }
    for stage, action, start, _ in step.timeline:
        virtual = action.chunk * stages + stage
        before = virtual - 1 if action.kind == "F" else virtual + 1
        if 0 <= before < stages * chunks:
            assert start >= ends[action.kind, before, action.microbatch] + times.link[min(virtual, before)]
    assert sum(duration for _, duration in step.critical_path) == step.step_time


@pytest.mark.parametrize("shape", INTERLEAVED)
@pytest.mark.parametrize("seed", range(8))
def test_waiting_more_is_never_faster(shape, seed):
    stages, microbatches, chunks, group = shape
    program = make_program("interleaved", stages, microbatches, chunks, group)
    times = drawn_times(stages * chunks, microbatches, seed)
    step = {sends: simulate(program, times, sends=sends).step_time for sends in SENDS}
    assert step["eager"] <= step["overlapped"] <= step["freed"]
    assert step["eager"] <= step["flushed"] <= step["flushed-freed"]
    assert step["freed"] == simulate(program, times, rendezvous=True).step_time


def test_receives_are_posted_ahead_in_the_steady_phase():
    steps = message_steps(make_program("interleaved", 4, 8, 2), "overlapped")[1]
    assert any(isinstance(step, Post) and len(step.messages) == 2 for step in steps)


def test_unknown_or_foreign_sends_are_named():
    program = make_program("1f1b", 2, 4)
    with pytest.raises(ConfigError, match="unknown sends"):
        message_steps(program, "telepathic")
    with pytest.raises(ConfigError, match="interleaved schedule"):
        message_steps(program, "overlapped")
