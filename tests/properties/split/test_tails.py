"""What stages do after the pipeline is minimised together with it: equal to enumeration, by both solvers."""

import random
import time
from dataclasses import replace
from itertools import product

import pytest
from how_many import how_many

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split import (
    LayerKind,
    PostPipelineTime,
    Segment,
    SplitProblem,
    solve,
    solver,
    stage_memory,
    step_of,
    time_of,
)
from mindspeed_autoparallel.planner.split.bounds.relaxation import relaxed_cuts


def random_problem(drawn):
    stages, sizes = drawn.randint(1, 3), (drawn.randint(1, 3), drawn.randint(2, 5))
    stages = min(stages, sum(sizes))
    segments = tuple(
        Segment(
            name=f"m{index}",
            num_layers=size,
            forward=drawn.randint(1, 20),
            backward=drawn.randint(1, 40),
            predecessors=(index - 1,) if index else (),
            kinds=(
                LayerKind(name="none", memory=(drawn.randint(4, 9),) * stages),
                LayerKind(name="full", memory=(drawn.randint(1, 4),) * stages, extra_backward=drawn.randint(1, 9)),
            ),
        )
        for index, size in enumerate(sizes)
    )
    tails = (
        PostPipelineTime(by_segment=(drawn.choice([0, 30]), drawn.randint(1, 60)), fixed=drawn.randint(0, 40)),
        PostPipelineTime(
            by_segment=(-drawn.randint(0, 20), drawn.randint(40, 90)),
            fixed=drawn.randint(0, 40),
            first_only=drawn.random() < 0.5,
        ),
    )
    return SplitProblem(
        segments=segments,
        num_stages=stages,
        num_microbatches=drawn.randint(1, 4),
        tails=tails,
        memory_limit=tuple(drawn.randint(12, 45) for _ in range(stages)),
        link=(drawn.randint(0, 5),) * (stages - 1),
        sends=drawn.choice(["eager", "blocking"]),
    )


def enumerated(problem):
    """The least of pipeline and longest tail over all plans that fit, with the tail by its definition."""
    best = None
    rows = [
        [row for row in product(range(s.num_layers + 1), repeat=problem.num_stages) if sum(row) == s.num_layers]
        for s in problem.segments
    ]
    for first, second in product(*rows):
        if max(v for v, n in enumerate(first) if n) > min(v for v, n in enumerate(second) if n):
            continue
        if not all(a + b for a, b in zip(first, second, strict=True)):
            continue
        for again in product(*(range(n + 1) for n in (*first, *second))):
            a, b = again[: len(first)], again[len(first) :]
            placement = tuple(
                (tuple(n - r for n, r in zip(layers, some, strict=True)), some)
                for layers, some in ((first, a), (second, b))
            )
            if any(x > y for x, y in zip(stage_memory(problem, placement), problem.memory_limit, strict=True)):
                continue
            longest = 0
            for v in range(problem.num_stages):
                for tail in problem.tails[: 1 if v and problem.tails[1].first_only else 2]:
                    held = [(n, t) for n, t in zip((first[v], second[v]), tail.by_segment, strict=True) if n and t]
                    longest = max(longest, sum(n * t for n, t in held) + (tail.fixed if held else 0))
            total = step_of(problem, placement).step_time + longest
            assert total == time_of(problem, placement)
            best = total if best is None else min(best, total)
    return best


@pytest.mark.parametrize("chains", [True, False])
def test_pipeline_and_tail_together_are_minimal(monkeypatch, chains):
    if not chains:
        monkeypatch.setattr(solver, "is_chain", lambda problem: False)
    drawn = random.Random(5)
    differs = 0
    for _ in range(how_many(12, 25)):
        problem = random_problem(drawn)
        best = enumerated(problem)
        if best is None:
            with pytest.raises(InfeasiblePlan):
                solve(problem)
            continue
        if not chains:
            # A fixed part is no linear row where a stage may hold layers without a tail: the bound leaves it out.
            assert solve(problem).lower_bound <= best
            problem = replace(problem, tails=tuple(replace(tail, fixed=0) for tail in problem.tails))
            best = enumerated(problem)
        found = solve(problem)
        assert found.status == "optimal"
        assert found.step_time == best == time_of(problem, found.placement)
        relaxed = relaxed_cuts(problem, time.monotonic() + 60)
        assert relaxed is not None and relaxed[1] <= best
        alone = solve(replace(problem, tails=()))
        differs += time_of(problem, alone.placement) > best
    assert differs, "no case in which the tail changes the best plan"
