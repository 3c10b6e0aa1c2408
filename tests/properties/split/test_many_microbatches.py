"""Long interleaved steps, searched with fewer microbatches: the plan is timed exactly, and the bound holds."""

import random

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, solve
from mindspeed_autoparallel.planner.split.model.solution import time_of
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.planner.split.strategies import virtual_stages

NUM_PROBLEMS = 6


def random_row(drawn):
    stages, memory = 2, drawn.randint(2, 6)
    kinds = (LayerKind(name="none", memory=(memory,) * 4), LayerKind(name="full", extra_backward=5, memory=(1,) * 4))
    return SplitProblem(
        segments=tuple(
            Segment(
                name=f"module{index}",
                num_layers=drawn.randint(3, 5),
                forward=drawn.randint(1, 20),
                backward=drawn.randint(1, 40),
                kinds=kinds,
                predecessors=tuple(range(index)),
            )
            for index in range(2)
        ),
        num_stages=stages,
        num_microbatches=60,
        num_chunks=2,
        schedule="interleaved",
        memory_limit=(drawn.randint(12, 40),) * stages,
        link=(1, 1, 1),
    )


def test_a_long_step_is_timed_and_bounded_exactly(monkeypatch):
    drawn, compared, fastest = random.Random(5), 0, 0
    while compared < NUM_PROBLEMS:
        problem = random_row(drawn)
        try:
            expected = solve(problem)
        except InfeasiblePlan:
            continue
        assert expected.status == "optimal"
        compared += 1
        with monkeypatch.context() as shorter:
            shorter.setitem(vars(SETTINGS), "long_step_many", 200)
            shorter.setitem(vars(SETTINGS), "long_step_fewer", 120)
            found = solve(problem, time_limit_s=20)
        assert virtual_stages.with_fewer_microbatches(problem) is None
        assert found.step_time == time_of(problem, found.placement)
        assert found.lower_bound <= expected.step_time <= found.step_time
        fastest += found.step_time == expected.step_time
    assert fastest >= NUM_PROBLEMS / 2
