"""The best k plans and the least memory are those of the enumeration of every plan."""

import random
from dataclasses import replace
from itertools import product

import pytest

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, solve, stage_memory, step_of
from mindspeed_autoparallel.planner.split.alternatives import best_plans
from mindspeed_autoparallel.planner.split.analysis import least_excess

COUNT = 6
COARSE = 7
"""Unit of memory limits that are asked for."""


def random_problem(drawn, schedule, stages, chunks):
    virtual = stages * chunks
    segments = []
    for index in range(2):
        plain = LayerKind(name="none", memory=tuple(drawn.randint(4, 12) for _ in range(virtual)))
        full = LayerKind(
            name="full",
            memory=tuple(drawn.randint(1, 6) for _ in range(virtual)),
            extra_backward=drawn.randint(1, 9),
            transient=drawn.choice([0, 3]),
        )
        segments.append(
            Segment(
                name=f"m{index}",
                num_layers=drawn.randint(2, 3),
                forward=drawn.randint(1, 20),
                backward=drawn.randint(0, 40),
                kinds=(plain, full) if index else (plain,),
                predecessors=(0,) if index else (),
            )
        )
    return SplitProblem(
        segments=tuple(segments),
        num_stages=stages,
        num_chunks=chunks,
        schedule=schedule,
        num_microbatches=4,
        memory_limit=(drawn.choice([6, 18, 26, 40]),) * stages,
        link=(drawn.randint(0, 3),) * (virtual - 1),
    )


def placements(problem):
    """Every plan's layers, with every way to recompute them."""
    virtual = problem.num_virtual
    first, second = problem.segments
    rows = [
        [row for row in product(range(s.num_layers + 1), repeat=virtual) if sum(row) == s.num_layers]
        for s in (first, second)
    ]
    for a, b in product(*rows):
        if max(v for v in range(virtual) if a[v]) > min(v for v in range(virtual) if b[v]):
            continue
        if all(x + y for x, y in zip(a, b, strict=True)):
            yield (
                (a, b),
                [
                    ((a,), (tuple(n - r for n, r in zip(b, again, strict=True)), again))
                    for again in product(*(range(n + 1) for n in b))
                ],
            )


@pytest.mark.parametrize("shape", [("1f1b", 2, 1), ("1f1b", 3, 1), ("gpipe", 3, 1), ("interleaved", 2, 2)])
def test_best_plans_and_least_memory_equal_enumeration(shape):
    drawn = random.Random(f"{shape}")
    with_plans = without = 0
    while with_plans + without < 14:
        problem = random_problem(drawn, *shape)
        if sum(s.num_layers for s in problem.segments) < problem.num_virtual:
            continue
        steps, overruns = [], []
        for _, ways in placements(problem):
            fitting = []
            for way in ways:
                over = max(x - y for x, y in zip(stage_memory(problem, way), problem.memory_limit, strict=True))
                overruns.append(over)
                if over <= 0:
                    fitting.append(step_of(problem, way).step_time)
            if fitting:
                steps.append(min(fitting))
        if not steps:
            without += 1
            with pytest.raises(InfeasiblePlan):
                solve(problem)
            assert least_excess(problem) == min(overruns)
            whole = least_excess(problem, resolution=COARSE)
            assert -(-whole // COARSE) == -(-min(overruns) // COARSE)
            raised = replace(problem, memory_limit=tuple(limit + min(overruns) for limit in problem.memory_limit))
            assert solve(raised).status == "optimal"
            continue
        with_plans += 1
        best = solve(problem)
        plans, complete = best_plans(problem, best, COUNT, 60)
        assert complete
        assert [step for _, step in plans] == sorted(steps)[:COUNT]
        layers = {tuple(tuple(map(sum, zip(*kinds, strict=True))) for kinds in plan) for plan, _ in plans}
        assert len(layers) == len(plans)
        for plan, step in plans:
            assert step_of(problem, plan).step_time == step
            assert all(x <= y for x, y in zip(stage_memory(problem, plan), problem.memory_limit, strict=True))
    assert min(with_plans, without) >= 2
