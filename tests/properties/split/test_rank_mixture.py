"""Mixtures of what ranks may hold: never above the best of all plans, and near it, on pipelines of two stacks."""

import itertools
import random
import time

import pytest

from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem
from mindspeed_autoparallel.planner.split.bounds.rank_mixture import RankMixture
from mindspeed_autoparallel.planner.split.model.problem import fullest_moments
from mindspeed_autoparallel.planner.split.model.solution import batch_simulator, stage_memory, time_of
from mindspeed_autoparallel.schedule import make_program


def two_stacks(drawn):
    """Two stacks of two kinds on two or three ranks with two chunks, in tight memory."""
    stages, chunks, fewest = drawn.choice([(2, 2, 2), (3, 2, 3)])
    virtual, segments = stages * chunks, []
    for index in range(2):
        forward, saved = drawn.randint(5, 40), drawn.randint(4, 20)
        plain = LayerKind(name="none", memory=(3,) * virtual, saved=saved)
        full = LayerKind(
            name="full", memory=(3,) * virtual, saved=1, extra_backward=forward, transient=drawn.choice([0, 9])
        )
        segments.append(
            Segment(
                name=f"stack{index}", num_layers=fewest + drawn.randint(0, 1), forward=forward, backward=2 * forward,
                kinds=(plain, full), predecessors=(index - 1,) if index else (),
            )
        )  # fmt: skip
    moments = fullest_moments(make_program("interleaved", stages, 6, chunks))
    whole = sum(s.num_layers * s.kinds[0].saved for s in segments) / stages
    limit = int(drawn.choice([0.6, 0.8, 1.0]) * whole * max(map(sum, moments[0])) / chunks) + 40
    return SplitProblem(
        segments=tuple(segments), num_stages=stages, num_chunks=chunks, num_microbatches=6, schedule="interleaved",
        memory_limit=(limit,) * stages, link=(2,) * (virtual - 1), in_flight=moments,
    )  # fmt: skip


def every_plan(problem):
    """Yield every placement without empty stages, regardless of its memory."""
    first, second = (segment.num_layers for segment in problem.segments)
    for cuts in itertools.combinations(range(1, first + second), problem.num_virtual - 1):
        ends = [(min(first, end), max(0, end - first)) for end in (0, *cuts, first + second)]
        held = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends)]
        for plain in itertools.product(*(itertools.product(*(range(n + 1) for n in stage)) for stage in held)):
            yield tuple(
                (
                    tuple(some[k] for some in plain),
                    tuple(stage[k] - some[k] for stage, some in zip(held, plain, strict=True)),
                )
                for k in range(2)
            )


@pytest.mark.parametrize("seed", range(20))
def test_no_bound_above_the_best_of_all_plans(seed):
    problem = two_stacks(random.Random(seed))
    fits = lambda plan: all(a <= b for a, b in zip(stage_memory(problem, plan), problem.memory_limit, strict=True))
    best = min((time_of(problem, plan) for plan in every_plan(problem) if fits(plan)), default=None)
    if best is None:
        return
    for target in (best + 1, 2 * best):
        bound = RankMixture(problem, batch_simulator(problem)).bound(0, target, time.monotonic() + 60, 200)
        assert bound is not None and 0.8 * best < bound <= best


def test_no_bound_where_choices_of_recomputation_may_be_missing():
    plain = LayerKind(name="none", memory=(9,) * 4, saved=10)
    full = LayerKind(name="full", memory=(3,) * 4, saved=0, extra_backward=10)
    layer = Segment(name="layer", num_layers=8, forward=10, backward=20, kinds=(plain, full))
    moments = fullest_moments(make_program("interleaved", 2, 4, 2))
    problem = SplitProblem(
        segments=(layer,), num_stages=2, num_chunks=2, num_microbatches=4, schedule="interleaved", memory_limit=(300, 300),
        in_flight=moments,
    )  # fmt: skip
    assert RankMixture(problem, batch_simulator(problem)).bound(0, 1000, time.monotonic() + 60, 10) is None
