"""The search of modules side by side finds what the integer solver finds, and its bound holds wherever it stops."""

import random

import pytest
from how_many import how_many

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, stage_memory
from mindspeed_autoparallel.planner.split.model.solution import time_of
from mindspeed_autoparallel.planner.split.state import Limits, State
from mindspeed_autoparallel.planner.split.strategies.integers import search_by_integers
from mindspeed_autoparallel.planner.split.strategies.side_by_side import search_side_by_side

NUM_PROBLEMS = how_many(10, 25)


def random_modules(drawn):
    """Two modules side by side, sometimes one that waits for both, a block beside the last, tight memory."""
    stages, microbatches = drawn.randint(2, 4), drawn.randint(1, 9)
    segments = []
    for index in range(drawn.randint(2, 3)):
        forward, memory = drawn.randint(1, 30), [drawn.randint(4, 12) for _ in range(stages)]
        kinds = [LayerKind(name="none", memory=tuple(memory))]
        if drawn.random() < 0.7:
            fewer = tuple(drawn.randint(1, size) for size in memory)
            kinds.append(LayerKind(name="full", extra_backward=forward, transient=drawn.choice([0, 3]), memory=fewer))
        segments.append(
            Segment(
                name=f"module{index}",
                num_layers=drawn.randint(2, 7),
                forward=forward,
                backward=0 if drawn.random() < 0.2 else 2 * forward,
                kinds=tuple(kinds),
                predecessors=(0, 1) if index == 2 else (),
            )
        )
    last = len(segments) - 1
    if drawn.random() < 0.3:
        block = LayerKind(name="none", memory=(drawn.randint(1, 5),) * stages)
        before = tuple(range(last + 1))
        segments.append(
            Segment(name="post", num_layers=1, forward=7, backward=9, kinds=(block,), predecessors=before, beside=last)
        )
    average = 8 * sum(segment.num_layers for segment in segments) // stages
    return SplitProblem(
        segments=tuple(segments),
        num_stages=stages,
        num_microbatches=microbatches,
        memory_limit=tuple(drawn.randint(average // 2, 2 * average) for _ in range(stages)),
        link=(drawn.randint(0, 3),) * (stages - 1),
        per_operation=drawn.randint(0, 2),
        sends=drawn.choice(["eager", "eager", "blocking"]),
        allow_empty_stages=drawn.random() < 0.2,
    )


def by_integers(problem):
    state = State(problem=problem, limits=Limits())
    search_by_integers(state)
    return state.solution()


def test_the_integer_solver_finds_no_faster_plan():
    drawn = random.Random(14)
    compared = proved = 0
    while compared < NUM_PROBLEMS:
        problem = random_modules(drawn)
        try:
            expected = by_integers(problem)
        except InfeasiblePlan:
            continue
        compared += 1
        assert expected.status == "optimal"
        for effort in (0.02, 10.0):
            found = State(problem=problem, limits=Limits(effort=effort))
            search_side_by_side(found)
            assert found.lower_bound <= expected.step_time
            if found.placement is not None:
                assert found.step_time == time_of(problem, found.placement) >= expected.step_time
                used = stage_memory(problem, found.placement)
                assert all(size <= limit for size, limit in zip(used, problem.memory_limit, strict=True))
        proved += found.closed
        if found.closed:
            assert found.step_time == expected.step_time
    assert proved >= 0.9 * NUM_PROBLEMS


@pytest.mark.parametrize("faster", [0, 1])
def test_below_a_known_time(faster):
    drawn = random.Random(3)
    for _ in range(how_many(3, 6)):
        problem = random_modules(drawn)
        try:
            expected = by_integers(problem)
        except InfeasiblePlan:
            continue
        found = State(problem=problem, limits=Limits(below=expected.step_time + faster))
        search_side_by_side(found)
        if found.closed:
            assert (found.placement is None) == (not faster)
            assert not faster or found.step_time == expected.step_time
        assert found.lower_bound <= expected.step_time
