"""What ranks recompute at least, in whole layers: never above any plan, of all plans of small pipelines."""

import itertools
import random
import time
from dataclasses import replace

import pytest

from mindspeed_autoparallel.planner.split import LayerKind, PostPipelineTime, Segment, SplitProblem
from mindspeed_autoparallel.planner.split.bounds.least_recompute import LeastRecompute
from mindspeed_autoparallel.planner.split.bounds.rank_mixture import RankMixture
from mindspeed_autoparallel.planner.split.bounds.relaxation import relaxed_cuts
from mindspeed_autoparallel.planner.split.bounds.whole_layers import query
from mindspeed_autoparallel.planner.split.bounds.whole_ranks import ranks_reach, whole_ranks_bound
from mindspeed_autoparallel.planner.split.model.problem import fullest_moments
from mindspeed_autoparallel.planner.split.model.solution import batch_simulator, stage_memory, time_of
from mindspeed_autoparallel.schedule import make_program


def one_stack(drawn, stages, chunks, layers):
    """A stack with blocks beside it or apart from it, or none; two or three kinds, transients, tails."""
    virtual, ends = stages * chunks, drawn.choice(["none", "beside", "apart"])
    program = make_program("interleaved" if chunks > 1 else "1f1b", stages, 4, chunks)
    forward, saved = drawn.randint(5, 40), drawn.randint(4, 20)
    plain = LayerKind(name="none", memory=(3,) * virtual, saved=saved)
    # Where recomputing frees nothing, one kind is left.
    least = drawn.choice([1, 1, 1, saved])
    full = replace(plain, name="full", saved=least, extra_backward=forward, transient=drawn.choice([0, 5, 30]))
    half = replace(full, name="half", saved=saved // 2, extra_backward=drawn.randint(1, forward), transient=3)
    kinds = (plain, full, half) if least < saved and drawn.random() < 0.5 and layers < 6 else (plain, full)
    stack = Segment(name="layer", num_layers=layers, forward=forward, backward=2 * forward, kinds=kinds)
    segments = (stack,)
    if ends != "none":
        block = LayerKind(name="none", memory=(drawn.randint(0, 9),) * virtual, saved=drawn.randint(0, 9))
        beside = 1 if ends == "beside" else None
        pre = Segment(name="pre", num_layers=1, forward=3, backward=5, kinds=(block,), beside=beside)
        post = Segment(
            name="post",
            num_layers=1,
            forward=forward,
            backward=forward,
            kinds=(block,),
            beside=beside,
            predecessors=(1,),
        )
        segments = (pre, replace(stack, predecessors=(0,)), post)
    moments = fullest_moments(program) if chunks > 1 else tuple(((stages - s,),) for s in range(stages))
    room = drawn.choice([0.3, 0.5, 0.7, 1.0])
    limit = int(room * layers / stages * saved * max(sum(moment) for moment in moments[0]) / chunks) + 4 * layers
    tail = PostPipelineTime(by_segment=tuple(drawn.choice([-2, 0, 7]) for _ in segments), fixed=drawn.choice([0, 20]))
    return SplitProblem(
        segments=segments,
        num_stages=stages,
        num_chunks=chunks,
        num_microbatches=4,
        schedule="interleaved" if chunks > 1 else "1f1b",
        memory_limit=(limit,) * stages,
        link=(drawn.randint(0, 4),) * (virtual - 1),
        in_flight=moments,
        sends="eager",
        tails=(tail,) if drawn.random() < 0.5 and min(tail.by_segment) >= 0 else (),
    )


def every_plan(problem):
    """Yield every placement, regardless of its memory."""
    stack = next(s for s in problem.segments if len(s.kinds) > 1)
    num, one = problem.num_virtual, len(problem.segments) == 1
    fewest = 0 if not one and problem.segments[0].beside is None else 1
    for cuts in itertools.combinations_with_replacement(range(stack.num_layers + 1), num - 1):
        held = [high - low for low, high in itertools.pairwise((0, *cuts, stack.num_layers))]
        if any(n < (fewest if v in (0, num - 1) else 1) for v, n in enumerate(held)):
            continue
        for ways in itertools.product(*(_ways(n, len(stack.kinds)) for n in held)):
            rows = tuple(zip(*ways, strict=True))
            ends = [(tuple(int(v == place) for v in range(num)),) for place in (0, num - 1)]
            yield (rows,) if one else (ends[0], rows, ends[1])


def _ways(layers, kinds):
    return [way for way in itertools.product(range(layers + 1), repeat=kinds) if sum(way) == layers]


SHAPES = [(2, 2, 5), (2, 2, 6), (3, 1, 6), (2, 1, 6), (2, 2, 7)]


@pytest.mark.parametrize("seed", [*range(23), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(23, 300))])
def test_whole_layers_recomputed_bound_no_plan_out(seed):
    drawn = random.Random(seed)
    problem = one_stack(drawn, *SHAPES[seed % len(SHAPES)])
    fits = lambda plan: all(a <= b for a, b in zip(stage_memory(problem, plan), problem.memory_limit, strict=True))
    plans = [(time_of(problem, plan), plan) for plan in every_plan(problem) if fits(plan)]
    plans.sort(key=lambda item: item[0])
    until = time.monotonic() + 60
    if not plans:
        return
    steps = [step for step, _ in plans]
    assert whole_ranks_bound(problem, 0, 2 * steps[-1]) <= steps[0]
    for target in (steps[0] + 1, 2 * steps[-1]):
        mixed = RankMixture(problem, batch_simulator(problem)).bound(0, target, until, 100)
        assert mixed is not None and mixed <= steps[0]
    for limit in {steps[0], steps[len(steps) // 3], steps[-1]}:
        assert ranks_reach(problem, limit)
        relaxed = relaxed_cuts(problem, until)
        assert relaxed is not None and relaxed[1] <= steps[0]
        answer = query(problem, tuple(relaxed[0]), int(limit), until, 1000)
        assert answer.status != "none below" and answer.bound <= steps[0]


def test_whole_layers_recomputed_bound_higher_than_fractions():
    plain = LayerKind(name="none", memory=(0,) * 4, saved=10)
    full = LayerKind(name="full", memory=(0,) * 4, saved=0, extra_backward=10)
    layer = Segment(name="layer", num_layers=8, forward=10, backward=20, kinds=(plain, full))
    problem = SplitProblem(
        segments=(layer,), num_stages=4, num_microbatches=32, memory_limit=(39, 29, 19, 9), in_flight=tuple(((4 - s,),) for s in range(4)),
    )  # fmt: skip
    relaxed = relaxed_cuts(problem, time.monotonic() + 60)
    assert relaxed is not None
    # Every rank has room for 0.9 to 0.975 layers: it recomputes 1.1 of its two in fractions, and both in whole layers.
    assert relaxed[1] < 32 * 78 < 32 * 80 <= whole_ranks_bound(problem, relaxed[1], 32 * 100)


@pytest.mark.parametrize("slow_bytes", [1, 0])
def test_ways_of_a_rank_with_one_chunk_and_one_kind_worth_taking(slow_bytes):
    plain = LayerKind(name="none", memory=(3, 3), saved=10)
    worse = LayerKind(name="worse", memory=(3, 3), saved=10 + slow_bytes, extra_backward=5)
    layer = Segment(name="layer", num_layers=8, forward=10, backward=20, kinds=(plain, worse))
    problem = SplitProblem(
        segments=(layer,), num_stages=2, num_microbatches=4, memory_limit=(99, 45), in_flight=(((2,),), ((1,),))
    )
    ranks = [LeastRecompute(problem, rank, (0,), {}) for rank in range(2)]
    assert [[rank.added(layers) for layers in range(6)] for rank in ranks] == [
        [0, 0, 0, 0, 0, None], [0, 0, 0, 0, None, None],
    ]  # fmt: skip
