"""The batch simulator equals the exact one, step by step, on random programs, sends and times."""

import random

import numpy
import pytest

from mindspeed_autoparallel.schedule import BatchSimulator, StepTimes, make_program, simulate

NUM_STEPS, NUM_AT_ONCE = 1_000, 10


def random_program(drawn):
    schedule = drawn.choice(["1f1b", "gpipe", "interleaved", "interleaved"])
    if schedule != "interleaved":
        program = make_program(schedule, drawn.randint(1, 6), drawn.randint(1, 8))
        return program, drawn.choice(["eager", "blocking"])
    stages, chunks = drawn.randint(2, 4), drawn.randint(2, 3)
    program = make_program(schedule, stages, stages * drawn.randint(1, 4), chunks)
    return program, drawn.choice(["eager", "blocking", "freed", "overlapped", "flushed", "flushed-freed"])


@pytest.mark.parametrize("seed", range(5))
def test_equals_the_exact_simulator_on_random_steps(seed):
    drawn = random.Random(seed)
    for _ in range(NUM_STEPS // NUM_AT_ONCE // 5):
        program, sends = random_program(drawn)
        virtual = len(program) * (1 + max(action.chunk for action in program[0]))
        link = [drawn.choice([0, drawn.randint(0, 30)]) for _ in range(virtual - 1)]
        extra = drawn.choice([0, 7])
        shape = (NUM_AT_ONCE, virtual)
        forward = numpy.array([drawn.randint(0, 10**9) for _ in range(NUM_AT_ONCE * virtual)]).reshape(shape)
        backward = numpy.array([drawn.randint(0, 10**9) for _ in range(NUM_AT_ONCE * virtual)]).reshape(shape)
        batch = BatchSimulator(program, sends, link, extra)
        times, paths = batch.critical_paths(forward, backward)
        assert (batch.step_times(forward, backward) == times).all()
        for index, path in enumerate(paths):
            exact = simulate(
                program,
                StepTimes(
                    forward=forward[index].tolist(), backward=backward[index].tolist(), link=link, per_operation=extra
                ),
                sends=sends,
            )
            assert times[index] == exact.step_time
            # The path is a lower bound on any other times, and its own length here.
            length = numpy.dot(path.num_forwards, forward[index]) + numpy.dot(path.num_backwards, backward[index])
            operations = sum(path.num_forwards) + sum(path.num_backwards)
            messages = exact.step_time - length - operations * extra
            assert messages >= 0
            assert messages == 0 or any(link)


def test_path_bounds_every_other_candidate():
    program = make_program("interleaved", 4, 8, 2)
    drawn = numpy.random.default_rng(0)
    forward, backward = drawn.integers(1, 1000, (50, 8)), drawn.integers(1, 1000, (50, 8))
    batch = BatchSimulator(program, "freed", [])
    times, paths = batch.critical_paths(forward, backward)
    for path in paths:
        assert (forward @ path.num_forwards + backward @ path.num_backwards <= times).all()


def test_candidates_beyond_one_pass_are_all_replayed(monkeypatch):
    from mindspeed_autoparallel.schedule import batch as module

    program = make_program("1f1b", 3, 4)
    forward = numpy.arange(1, 61).reshape(20, 3)
    batch = BatchSimulator(program, "blocking", [1, 2])
    whole = batch.step_times(forward, 2 * forward)
    monkeypatch.setattr(module, "BYTES_AT_ONCE", 8 * 40 * 3)
    assert (BatchSimulator(program, "blocking", [1, 2]).step_times(forward, 2 * forward) == whole).all()


def test_no_candidates_no_times():
    assert (
        len(
            BatchSimulator(make_program("1f1b", 2, 2), "eager", []).step_times(numpy.zeros((0, 2)), numpy.zeros((0, 2)))
        )
        == 0
    )


def test_equals_the_exact_simulator_where_microbatches_differ():
    drawn = random.Random(7)
    for _ in range(60):
        program, sends = random_program(drawn)
        virtual = len(program) * (1 + max(action.chunk for action in program[0]))
        count = 1 + max(action.microbatch for action in program[0])
        link = [drawn.randint(0, 30) for _ in range(virtual - 1)]
        generator = numpy.random.default_rng(drawn.randint(0, 10**6))
        forward, backward = generator.integers(0, 10**6, (2, 3, virtual, count))
        times = BatchSimulator(program, sends, link, 7).step_times(forward, backward)
        for index in range(3):
            rows = StepTimes(
                forward=forward[index].tolist(), backward=backward[index].tolist(), link=link, per_operation=7
            )
            assert times[index] == simulate(program, rows, sends=sends).step_time
