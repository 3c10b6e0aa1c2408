"""Mixtures of what ranks may hold: never above the best plan, and near it, on pipelines of two stacks."""

import random
import time

import pytest

from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, solve
from mindspeed_autoparallel.planner.split.bounds.rank_mixture import RankMixture
from mindspeed_autoparallel.planner.split.model.problem import fullest_moments
from mindspeed_autoparallel.planner.split.model.solution import batch_simulator
from mindspeed_autoparallel.schedule import make_program


def two_stacks(drawn):
    """Two stacks of two kinds on two or three ranks with two chunks, in tight memory."""
    stages, chunks = drawn.choice([(2, 2), (3, 2)])
    virtual, segments = stages * chunks, []
    for index in range(2):
        forward, saved = drawn.randint(5, 40), drawn.randint(4, 20)
        plain = LayerKind(name="none", memory=(3,) * virtual, saved=saved)
        full = LayerKind(
            name="full", memory=(3,) * virtual, saved=1, extra_backward=forward, transient=drawn.choice([0, 9])
        )
        before = (index - 1,) if index else ()
        segments.append(
            Segment(
                name=f"stack{index}", num_layers=drawn.randint(2, 5), forward=forward, backward=2 * forward,
                kinds=(plain, full), predecessors=before,
            )
        )  # fmt: skip
    moments = fullest_moments(make_program("interleaved", stages, 6, chunks))
    whole = sum(s.num_layers * s.kinds[0].saved for s in segments) / stages
    limit = int(drawn.choice([0.6, 0.8, 1.0]) * whole * max(map(sum, moments[0])) / chunks) + 40
    return SplitProblem(
        segments=tuple(segments), num_stages=stages, num_chunks=chunks, num_microbatches=6, schedule="interleaved",
        memory_limit=(limit,) * stages, link=(2,) * (virtual - 1), in_flight=moments,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_no_bound_above_the_best_plan_of_two_stacks(seed):
    try:
        problem = two_stacks(random.Random(seed))
        best = solve(problem, time_limit_s=20)
    except AutoParallelError:  # too few layers, or none fits
        return
    assert best.status == "optimal"
    bound = RankMixture(problem, batch_simulator(problem)).bound(0, 2 * best.step_time, time.monotonic() + 60, 200)
    assert bound is not None and 0.8 * best.step_time < bound <= best.step_time
