"""DualPipeV: order, messages that meet, and what MindSpeed refuses. Beside its source: tests/emulated."""

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule import StepTimes, in_flight, make_program, program_to_text, simulate
from mindspeed_autoparallel.schedule.dualpipev import DUALPIPEV, chain_stage, dualpipev_program


def test_the_chain_goes_down_and_up_again():
    assert [[chain_stage(rank, chunk, 3) for chunk in range(2)] for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_two_ranks_run_in_the_order_of_mindspeeds_picture():
    assert program_to_text(dualpipev_program(2, 4)).splitlines() == [
        "F0.0,F0.1,F0.2,F1.0,B1.0,F1.1,F0.3,B1.1,F1.2,B0.0,B1.2,F1.3,B0.1,B1.3,B0.2,B0.3",
        "F0.0,F1.0,F0.1,F1.1,F0.2,B1.0,F1.2,B0.0,F0.3,B1.1,F1.3,B0.1,B1.2,B0.2,B1.3,B0.3",
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 2, 7])
def test_every_pass_runs_once_and_no_rank_waits_for_ever(size, more):
    count = 2 * size - 1 + more
    program = dualpipev_program(size, count)
    wanted = sorted((kind, chunk, number) for kind in "FB" for chunk in range(2) for number in range(count))
    assert all(sorted(action[:3] for action in actions) == wanted for actions in program)
    times = StepTimes(forward=[10] * 2 * size, backward=[20] * 2 * size, link=[1] * (2 * size - 1))
    step = simulate(program, times, sends=DUALPIPEV, with_timeline=True)
    assert step.busy == (count * 60,) * size
    # Two chunks of every microbatch in flight at most, as the first rank of 1F1B has, and one more.
    assert max(in_flight(program)) <= 2 * size + 1


def test_the_bubble_is_smaller_than_that_of_1f1b():
    size, count = 4, 16
    program = dualpipev_program(size, count)
    step = simulate(program, StepTimes(forward=[10] * 8, backward=[20] * 8), sends=DUALPIPEV).step_time
    plain = simulate(make_program("1f1b", size, count), StepTimes(forward=[20] * 4, backward=[40] * 4)).step_time
    assert count * 60 < step < plain


def test_sizes_that_mindspeed_refuses_are_refused():
    with pytest.raises(ConfigError, match="at least 7 microbatches"):
        dualpipev_program(4, 6)
    with pytest.raises(ConfigError, match="2 pipeline ranks or more, got 1"):
        dualpipev_program(1, 8)
