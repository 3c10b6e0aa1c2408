"""The local search, and that below a target: placements fit, have the step time reported, and are the same for the same
seed; the prices of moves are those of the placements after them."""

import random
from dataclasses import replace
from math import inf

import numpy
import pytest

from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, stage_memory, step_of
from mindspeed_autoparallel.planner.split.heuristics.candidates import Evaluator
from mindspeed_autoparallel.planner.split.heuristics.local_search import LocalSearch
from mindspeed_autoparallel.planner.split.heuristics.rank_moves import RankMoves
from mindspeed_autoparallel.planner.split.heuristics.target_search import TargetSearch
from mindspeed_autoparallel.planner.split.model.problem import fullest_moments
from mindspeed_autoparallel.schedule import make_program


def pipeline(seed, stages, chunks, microbatches, layers, room):
    """Two modules one after the other, each layer whole or recomputed; ``room``: of what all layers whole would need."""
    drawn, virtual = random.Random(seed), stages * chunks
    moments = fullest_moments(make_program("interleaved", stages, microbatches, chunks))
    first, segments = drawn.randint(1, layers - 1), []
    for index, count in enumerate((first, layers - first)):
        forward, saved = drawn.randint(5, 40), drawn.randint(4, 20)
        plain = LayerKind(name="none", memory=(3,) * virtual, saved=saved)
        full = replace(plain, name="full", saved=1, extra_backward=forward)
        before = (0,) if index else ()
        segments.append(
            Segment(
                name=f"m{index}",
                num_layers=count,
                forward=forward,
                backward=2 * forward,
                kinds=(plain, full),
                predecessors=before,
            )
        )
    whole = sum(s.num_layers * s.kinds[0].saved for s in segments) / virtual
    return SplitProblem(
        segments=tuple(segments),
        num_stages=stages,
        num_chunks=chunks,
        num_microbatches=microbatches,
        schedule="interleaved",
        memory_limit=(int(room * whole * max(sum(moment) for moment in moments[0])) + 3 * layers,) * stages,
        link=(2,) * (virtual - 1),
        sends="eager",
        in_flight=moments,
    )


@pytest.mark.parametrize("room", [0.4, 3.0])
def test_the_best_placement_fits_and_takes_its_step_time(room):
    problem = pipeline(3, 4, 2, 16, 30, room)
    evaluator = Evaluator(problem)
    search = LocalSearch(evaluator, inf)
    assert search.start()
    search.improve(4_000)
    assert bool(search.best.one.extra.any()) == (room < 1)
    placement = evaluator.placement(search.best.one)
    assert step_of(problem, placement).step_time == search.best.step
    assert all(a <= b for a, b in zip(stage_memory(problem, placement), problem.memory_limit, strict=True))


def test_the_same_seed_finds_the_same_and_more_than_descents_alone():
    problem = pipeline(1, 4, 2, 16, 40, 0.5)
    found = []
    for _ in range(2):
        search = LocalSearch(Evaluator(problem), inf)
        search.start()
        before = search.best.step
        search.improve(8_000)
        found.append((search.best.step, search.best.one.ends.tolist(), search.best.one.extra.tolist()))
        assert search.best.step < before
    assert found[0] == found[1]


def searched(problem, moves):
    search = LocalSearch(Evaluator(problem), inf)
    assert search.start()
    before = search.best.step
    TargetSearch(search).run(moves, 0)
    return before, search.best, search.evaluator


@pytest.mark.parametrize(("stages", "chunks", "layers"), [(4, 2, 30), (4, 3, 25), (8, 2, 24)])
def test_below_a_target_the_best_placement_fits_and_takes_its_step_time(stages, chunks, layers):
    problem = pipeline(3, stages, chunks, 16, layers, 0.5)
    before, best, evaluator = searched(problem, 300)
    assert best.one.extra.any() and best.step <= before
    placement = evaluator.placement(best.one)
    assert step_of(problem, placement).step_time == best.step
    assert all(a <= b for a, b in zip(stage_memory(problem, placement), problem.memory_limit, strict=True))


def test_below_a_target_the_same_seed_finds_the_same_and_more_than_descents_alone():
    problem = pipeline(1, 4, 2, 16, 40, 0.5)
    (before, one, _), (_, other, _) = (searched(problem, 500) for _ in range(2))
    assert one.step == other.step < before
    assert one.one.ends.tolist() == other.one.ends.tolist() and one.one.extra.tolist() == other.one.extra.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_prices_of_moves_are_those_of_the_cheapest_choices_of_changed_ranks(seed):
    problem = pipeline(seed, 4, 3, 16, 26, 0.45)
    evaluator, drawn = Evaluator(problem), numpy.random.default_rng(seed)
    search = LocalSearch(evaluator, inf)
    assert search.start()
    here, size = search.best.one, problem.num_stages
    priced = RankMoves(evaluator, search.moves)
    for _ in range(3):
        prices = drawn.random(problem.num_virtual)
        ends, extra = here.ends[0], here.extra[0]
        priced.go_to(ends, extra)
        costs, held = priced.costs(prices), evaluator.row.held(here.ends)[0]
        fits = numpy.flatnonzero(numpy.isfinite(costs))
        extras = priced.extras(fits)
        for move, cost in enumerate(costs):
            other = ends + search.moves[move]
            if not evaluator.row.is_cut(other[None])[0]:
                assert not numpy.isfinite(cost)
                continue
            theirs, expected = evaluator.row.held(other[None])[0], 0.0
            for rank in range(size):
                if (theirs[rank::size] != held[rank::size]).any():
                    ways = evaluator.extras_of(rank, theirs[rank::size])
                    least = (ways @ prices[rank::size]).min() if len(ways) else inf
                    expected += least - extra[rank::size] @ prices[rank::size]
            assert cost == pytest.approx(expected)
        assert numpy.allclose((extras - extra) @ prices, costs[fits])
        moved = fits[int(drawn.integers(len(fits)))]
        chosen = priced.extras(numpy.array([moved]))
        here = evaluator.placed((ends + search.moves[moved])[None], chosen)
