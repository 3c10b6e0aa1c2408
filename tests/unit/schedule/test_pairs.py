"""Combined 1F1B: order, what pairs save, and what they wait for."""

import numpy
import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule import (
    BatchSimulator,
    StepTimes,
    in_flight,
    make_program,
    program_from_text,
    program_to_text,
    simulate,
)


def test_one_forward_more_warms_up_and_then_all_run_in_pairs():
    text = program_to_text(make_program("interleaved", 2, 2, 2, 0, True))
    assert text.splitlines() == ["F0.0,F0.1,F1.0,F1.1,B1.0,B1.1,B0.0,B0.1", "F0.0,F0.1,F1.0,F1.1,+B1.0,B1.1,B0.0,B0.1"]
    assert program_to_text(make_program("1f1b", 1, 3, 1, 0, True)) == "F0.0,F0.1,+B0.0,F0.2,+B0.1,B0.2\n"


@pytest.mark.parametrize("shape", [("interleaved", 4, 8, 2, 0), ("interleaved", 2, 7, 3, 5), ("1f1b", 1, 4, 1, 0)])
def test_pairs_hold_a_forward_more_do_the_same_work_and_survive_as_text(shape):
    plain, pairs = make_program(*shape), make_program(*shape, True)
    assert [sorted(action[:3] for action in row) for row in plain] == [
        sorted(action[:3] for action in row) for row in pairs
    ]
    assert all(after - before in (0, 1) for before, after in zip(in_flight(plain), in_flight(pairs), strict=True))
    assert program_from_text(program_to_text(pairs)) == pairs


def test_only_pairs_save_and_never_what_runs_alone():
    program = make_program("1f1b", 1, 5, 1, 0, True)
    assert simulate(program, StepTimes(forward=[3], backward=[5], paired_saving={(0, 0): 2})).step_time == 5 * 8 - 4 * 2


def test_a_pair_waits_for_both_messages_and_may_lose_by_it():
    """Messages that plain passes hide behind one another are waited for by a pair."""
    program, plain = make_program("interleaved", 2, 8, 2, 0, True), make_program("interleaved", 2, 8, 2)
    saving = {(v, w): 8 for v in range(4) for w in range(4)}

    def step(rows, link, saved):
        times = StepTimes(forward=[10] * 4, backward=[20] * 4, link=[link] * 3, paired_saving=saved)
        return simulate(rows, times, sends="freed").step_time

    assert step(program, 9, {}) > step(plain, 9, {})
    assert step(program, 9, saving) > step(plain, 9, {})
    assert step(program, 1, saving) < step(plain, 1, {})


@pytest.mark.parametrize("sends", ["blocking", "freed", "overlapped", "flushed"])
def test_the_batch_simulator_takes_pairs_as_long_as_their_passes(sends):
    program = make_program("interleaved", 4, 8, 2, 0, True)
    drawn = numpy.random.default_rng(3)
    forward, backward = drawn.integers(1, 60, (20, 8)), drawn.integers(1, 90, (20, 8))
    link = tuple(drawn.integers(0, 9, 7).tolist())
    found = BatchSimulator(program, sends, link).step_times(forward, backward)
    for index, step in enumerate(found):
        times = StepTimes(forward=forward[index].tolist(), backward=backward[index].tolist(), link=link)
        assert simulate(program, times, sends=sends).step_time == step


def test_pairs_need_virtual_stages_or_one_stage():
    with pytest.raises(ConfigError, match="combined 1F1B runs on one stage or with virtual stages, not 2 stages"):
        make_program("1f1b", 2, 4, 1, 0, True)
    with pytest.raises(ConfigError, match="combined 1F1B"):
        make_program("gpipe", 1, 4, 1, 0, True)
