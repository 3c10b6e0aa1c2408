"""SearchContext for something faster than a known plan: the same optimum, or the proof that there is none."""

import random
import time

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split import LayerKind, NoneBelow, Segment, SplitProblem, solve, solver
from mindspeed_autoparallel.planner.split.bounds.relaxation import relaxed_cuts


def random_problem(drawn):
    stages = drawn.randint(1, 4)
    kinds = (
        LayerKind(name="none", memory=(drawn.randint(3, 6),) * stages),
        LayerKind(name="full", memory=(1,) * stages, extra_backward=drawn.randint(1, 9)),
    )
    return SplitProblem(
        segments=tuple(
            Segment(
                name=f"m{index}",
                num_layers=size,
                forward=drawn.randint(1, 9),
                backward=drawn.randint(1, 20),
                kinds=kinds,
                predecessors=(index - 1,) if index else (),
            )
            for index, size in enumerate((drawn.randint(1, 3), drawn.randint(stages, 8)))
        ),
        num_stages=stages,
        num_microbatches=drawn.randint(1, 8),
        memory_limit=(drawn.randint(8, 30),) * stages,
    )


@pytest.mark.parametrize("chains", [True, False])
def test_below_a_known_time_the_solver_returns_the_optimum_or_a_proof(monkeypatch, chains):
    if not chains:
        monkeypatch.setattr(solver, "is_chain", lambda problem: False)
    drawn = random.Random(11)
    compared = 0
    for _ in range(40):
        problem = random_problem(drawn)
        try:
            best = solve(problem).step_time
        except InfeasiblePlan:
            with pytest.raises(InfeasiblePlan):
                solve(problem, below=10**6)
            continue
        compared += 1
        assert solve(problem, below=best + drawn.randint(1, 50)).step_time == best
        for below in (best, best - 1, best // 2):
            with pytest.raises(NoneBelow):
                solve(problem, below=below)
        relaxed = relaxed_cuts(problem, time.monotonic() + 60, stop_at=best // 2)
        assert relaxed is not None and relaxed[1] <= best
    assert compared > 20


def test_matrices_are_multiplied_by_one_thread_whatever_the_environment_gives(monkeypatch):
    seen = []
    looking = solver.Strategy("looking", lambda state: True, lambda state: seen.append(blas_threads()))
    monkeypatch.setattr(solver, "PORTFOLIO", (looking, *solver.PORTFOLIO))
    with threadpool_limits(limits=2, user_api="blas"):
        solve(random_problem(random.Random(0)))
        assert blas_threads() == {2}
    assert seen == [{1}]


def blas_threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}
