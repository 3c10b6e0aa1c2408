"""Pipelines with virtual stages: exact memory of chunks that share a rank, every small case equal to enumeration."""

import itertools
import random
import time
from dataclasses import replace

import numpy
import pytest
from small_pipeline import pipeline

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split import (
    LayerKind,
    PostPipelineTime,
    Segment,
    SplitProblem,
    solve,
    stage_memory,
    step_of,
)
from mindspeed_autoparallel.planner.split.bounds.relaxation import relaxed_cuts
from mindspeed_autoparallel.planner.split.bounds.whole_layers import raised_bound
from mindspeed_autoparallel.planner.split.bounds.whole_ranks import rank_cuts, ranks_reach, whole_ranks_bound
from mindspeed_autoparallel.planner.split.group_sizes import sizes_to_try, solve_group_sizes, with_group_size
from mindspeed_autoparallel.planner.split.heuristics.candidates import Evaluator
from mindspeed_autoparallel.planner.split.model.problem import fullest_moments
from mindspeed_autoparallel.planner.split.model.rank_kinds import _least
from mindspeed_autoparallel.planner.split.model.solution import time_of
from mindspeed_autoparallel.planner.split.state import Limits, State
from mindspeed_autoparallel.planner.split.strategies.virtual_stages import search_row
from mindspeed_autoparallel.schedule import group_sizes, make_program


def enumerated(problem):
    """The least step of every cut of the row and every number recomputed on each virtual stage, or None."""
    num, kinds = problem.num_virtual, [s.num_layers for s in problem.segments]
    best = None
    for ends in itertools.combinations(range(1, sum(kinds)), num - 1):
        cuts = [0, *ends, sum(kinds)]
        held = [
            [max(0, min(high, edge) - max(low, start)) for low, high in itertools.pairwise(cuts)]
            for start, edge in ((0, kinds[0]), (kinds[0], sum(kinds)))
        ]
        for again in itertools.product(*[range(count + 1) for row in held for count in row]):
            rows = [again[:num], again[num:]]
            placement = tuple(
                (tuple(h - r for h, r in zip(count, row, strict=True)), tuple(row))
                for count, row in zip(held, rows, strict=True)
            )
            if any(a > b for a, b in zip(stage_memory(problem, placement), problem.memory_limit, strict=True)):
                continue
            step = step_of(problem, placement).step_time
            best = step if best is None else min(best, step)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_small_cases_equal_enumeration(seed):
    drawn = random.Random(seed)
    problem = pipeline(drawn, 2, 2, drawn.choice([2, 4]), drawn.randint(5, 6), drawn.choice([0.35, 0.6, 0.9]))
    expected = enumerated(problem)
    if expected is None:
        with pytest.raises(InfeasiblePlan):
            solve(problem)
        return
    found = solve(problem)
    assert (found.status, found.step_time, found.lower_bound) == ("optimal", expected, expected)


@pytest.mark.parametrize("seed", range(8))
def test_the_best_of_all_group_sizes_equals_enumeration_of_splits_and_sizes(seed):
    drawn = random.Random(100 + seed)
    problem = pipeline(drawn, 2, 2, drawn.choice([3, 4, 5]), 5, drawn.choice([0.6, 0.9, 2.0]))
    sizes = group_sizes(2, problem.num_microbatches)
    assert sizes == sizes_to_try(2, problem.num_microbatches)
    steps = {size: enumerated(with_group_size(problem, size)) for size in sizes}
    if steps[sizes[0]] is None:
        with pytest.raises(InfeasiblePlan):
            solve_group_sizes(problem, time_limit_s=60)
        return
    expected = min(step for step in steps.values() if step is not None)
    found = solve_group_sizes(problem, time_limit_s=60)
    assert (found.solution.status, found.solution.step_time) == ("optimal", expected)
    assert steps[found.problem.microbatch_group_size] == expected
    assert [one.size for one in found.tried] == list(sizes)
    assert all(one.lower_bound <= (steps[one.size] or one.lower_bound) for one in found.tried)


def test_a_group_size_gains_where_messages_are_long():
    """With groups of 4 on 4 ranks, each round begins with a message that is still on its way from the last rank."""
    problem = replace(pipeline(random.Random(2), 4, 2, 12, 16, 100.0), sends="eager", link=(30,) * 7)
    found = solve_group_sizes(problem, time_limit_s=20)
    (plain,) = [one.step_time for one in found.tried if one.size == 4]
    assert found.problem.microbatch_group_size > 4
    assert found.solution.step_time < plain
    assert found.solution.step_time == step_of(found.problem, found.solution.placement).step_time


@pytest.mark.parametrize(("stages", "chunks", "layers"), [(2, 2, 12), (2, 3, 11), (4, 2, 12), (3, 3, 12)])
def test_twelve_layers_without_recomputation_equal_enumeration(stages, chunks, layers):
    drawn = random.Random(layers * stages)
    problem = pipeline(drawn, stages, chunks, 2 * stages, layers, 100.0)
    evaluator = Evaluator(problem)
    cuts = numpy.array([[0, *ends, layers] for ends in itertools.combinations(range(1, layers), stages * chunks - 1)])
    steps = evaluator.steps(evaluator.candidates(cuts, numpy.ones(problem.num_virtual)))
    found = solve(problem)
    assert (found.status, found.step_time) == ("optimal", int(steps.min()))


def test_a_tight_pipeline_has_a_plan_that_fits_and_a_bound_below_it():
    problem = pipeline(random.Random(3), 4, 2, 8, 40, 0.45)
    found = solve(problem, time_limit_s=20, effort=0.2)
    assert all(a <= b for a, b in zip(stage_memory(problem, found.placement), problem.memory_limit, strict=True))
    assert any(row for rows in found.placement for row in rows[1])
    assert found.lower_bound <= found.step_time == step_of(problem, found.placement).step_time


def test_the_same_effort_finds_the_same():
    problem = pipeline(random.Random(4), 4, 2, 8, 30, 0.5)
    first, again = (solve(problem, time_limit_s=600, effort=0.1) for _ in range(2))
    assert (first.placement, first.lower_bound) == (again.placement, again.lower_bound)


@pytest.mark.parametrize("group", [0, 3, 4])
def test_no_moment_of_the_schedule_is_fuller_than_the_fullest(group):
    """In every chunk, copies at any moment are within one of those at a listed moment."""
    program = make_program("interleaved", 2, 8, 3, group)
    for actions, moments in zip(program, fullest_moments(program), strict=True):
        now = [0] * 3
        for action in actions:
            now[action.chunk] += 1 if action.kind == "F" else -1
            assert any(all(a <= b for a, b in zip(now, moment, strict=True)) for moment in moments)


def test_a_plan_is_near_a_layout_by_hand_in_the_memory_that_takes() -> None:
    """Nothing can be recomputed, and placements that fit are rare: 80 layers on 8 x 5 virtual stages, two each."""
    stages, chunks, microbatches, layers = 8, 5, 16, 80
    virtual = stages * chunks
    layer = LayerKind(name="none", memory=(400,) * virtual, saved=68)
    table = LayerKind(name="none", memory=(1600,) * virtual, saved=10)
    problem = SplitProblem(
        segments=(
            Segment(name="embedding", num_layers=1, forward=5, backward=10, kinds=(table,)),
            Segment(name="layer", num_layers=layers, forward=100, backward=200, kinds=(layer,), predecessors=(0,)),
            Segment(name="loss", num_layers=1, forward=70, backward=140, kinds=(table,), predecessors=(1,)),
        ),
        num_stages=stages,
        num_chunks=chunks,
        num_microbatches=microbatches,
        schedule="interleaved",
        memory_limit=(2**40,) * stages,
        sends="eager",
        in_flight=fullest_moments(make_program("interleaved", stages, microbatches, chunks)),
    )
    # Llama 3 70B, as a public recipe of Megatron-Bridge has it.
    counts = (*(2,) * 35, 3, 2, 2, 2, 1)
    nowhere = (0,) * (virtual - 1)
    by_hand = (((1, *nowhere),), (counts,), ((*nowhere, 1),))
    peak = max(stage_memory(problem, by_hand))
    found = solve(replace(problem, memory_limit=(peak,) * stages), time_limit_s=60, effort=0.1)
    assert found.step_time <= 1.02 * time_of(problem, by_hand)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_the_paths_through_a_ranks_work_are_no_longer_than_any_plan(schedule, chunks):
    drawn = random.Random(schedule)
    for sends in ("eager", "blocking") if chunks == 1 else ("eager", "freed"):
        for _ in range(20):
            stages, layers = drawn.choice([2, 3, 4]), drawn.randint(12, 20)
            virtual = stages * chunks
            layer = LayerKind(name="none", memory=(0,) * virtual)
            tail = PostPipelineTime(by_segment=(drawn.randint(0, 5),), fixed=drawn.randint(0, 3))
            problem = SplitProblem(
                segments=(Segment(name="layer", num_layers=layers, forward=7, backward=13, kinds=(layer,)),),
                num_stages=stages,
                num_chunks=chunks,
                num_microbatches=stages * drawn.randint(1, 3),
                schedule=schedule,
                memory_limit=(1,) * stages,
                link=tuple(drawn.randint(0, 9) for _ in range(virtual - 1)),
                per_operation=drawn.choice([0, 2]),
                sends=sends,
                tails=(tail,),
            )
            ends = [0, *sorted(drawn.sample(range(1, layers), virtual - 1)), layers]
            counts = tuple(high - low for low, high in itertools.pairwise(ends))
            step = time_of(problem, ((counts,),))
            for forwards, backwards, constant, last in rank_cuts(problem):
                held = sum(counts[last::stages])
                path = sum(count * (7 * f + 13 * b) for count, f, b in zip(counts, forwards, backwards, strict=True))
                assert path + constant + held * tail.by_segment[0] <= step


@pytest.mark.parametrize("seed", range(6))
def test_ranks_reach_every_step_that_a_plan_takes(seed):
    drawn = random.Random(seed)
    problem = pipeline(drawn, 2, 2, 4, 6, drawn.choice([0.35, 0.6, 100.0]))
    evaluator = Evaluator(problem)
    cuts = numpy.array([[0, *ends, 6] for ends in itertools.combinations(range(1, 6), 3)])
    fitting = evaluator.candidates(cuts, numpy.ones(4))
    steps = evaluator.steps(fitting)
    for limit in sorted(set(steps.tolist())):
        assert ranks_reach(problem, limit)
    if len(steps):
        assert whole_ranks_bound(problem, 0, 2 * steps.max()) <= steps.min()
        # Nothing is faster than the optimum, and questions of whole layers find that out.
        assert 0.9 * steps.min() <= raised_bound(problem, 0, steps.min(), time.monotonic() + 60) <= steps.min()
        assert raised_bound(problem, 0, 2 * steps.max(), time.monotonic() + 60) <= steps.min()
    relaxed = relaxed_cuts(problem, time.monotonic() + 60)
    if len(steps) and relaxed is not None:
        again = relaxed_cuts(problem, time.monotonic() + 60, steps.min())
        assert again is not None and again[1] <= steps.min()


def test_ranks_that_cannot_share_their_layers_in_fractions_bound_higher_than_fractions():
    kind = LayerKind(name="none", memory=(0,) * 8)
    layer = Segment(name="layer", num_layers=20, forward=10, backward=20, kinds=(kind,))
    loss = Segment(name="loss", num_layers=1, forward=14, backward=28, kinds=(kind,), predecessors=(0,))
    problem = SplitProblem(
        segments=(layer, loss), num_stages=4, num_chunks=2, num_microbatches=16, schedule="interleaved",
        memory_limit=(1,) * 4,
    )  # fmt: skip
    (_, fractions) = relaxed_cuts(problem, time.monotonic() + 60, most_rounds=1)
    bound = whole_ranks_bound(problem, fractions, 1.3 * fractions)
    found = solve(problem, time_limit_s=60)
    # 20 layers and a loss of 1.4 on four ranks: 5.35 each in fractions, but some rank holds six.
    assert fractions < 16 * 30 * 5.5 and 0.97 * 16 * 30 * 6 <= bound <= found.step_time


def test_a_deadline_that_has_passed_ends_the_search_with_what_is_proved():
    problem = pipeline(random.Random(3), 2, 2, 4, 40, 0.6)
    state = State(problem=problem, limits=Limits())
    search_row(state, time.monotonic() - 1)
    assert state.lower_bound <= solve(problem, time_limit_s=60).step_time


def test_ways_that_others_beat_are_dropped_as_one_by_one():
    drawn = numpy.random.default_rng(5)
    for size in (0, 1, 2, 300):
        whole, extra = drawn.integers(0, 40, (2, size))
        kept = []
        for index in numpy.lexsort((extra, whole)):
            if not kept or extra[index] < extra[kept[-1]]:
                kept.append(int(index))
        assert _least(whole, extra).tolist() == kept
