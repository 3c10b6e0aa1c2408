"""Problems of few placements of any shape are solved exactly: against a plain loop over all placements."""

import itertools
import random

import pytest
from how_many import how_many
from small_splits import random_problem

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split import NoneBelow, solve, stage_memory, time_of
from mindspeed_autoparallel.planner.split.state import Limits, State
from mindspeed_autoparallel.planner.split.strategies.enumeration import enumerate_all
from mindspeed_autoparallel.schedule import BatchSimulator

SHAPES = [("1f1b", 1, 1), ("1f1b", 2, 1), ("1f1b", 4, 1), ("gpipe", 3, 1), ("interleaved", 2, 2), ("interleaved", 2, 3)]
NUM_PER_SHAPE = how_many(6, 12)
MOST_TRIED = 4_000


def spread(num_layers, cells):
    """Return every way to put equal layers into cells."""
    if cells == 1:
        return [(num_layers,)]
    return [(first, *rest) for first in range(num_layers + 1) for rest in spread(num_layers - first, cells - 1)]


def is_placement(problem, here):
    virtual = range(problem.num_virtual)
    for k, segment in enumerate(problem.segments):
        first = min(v for v in virtual if here[k][v])
        if any(max(v for v in virtual if here[before][v]) > first for before in segment.predecessors):
            return False
        if segment.beside is not None and any(here[k][v] > here[segment.beside][v] for v in virtual):
            return False
    for joint in problem.joints:
        end = max(v for v in virtual if here[joint.before][v])
        if sum(here[joint.segment][: end + 1]) < joint.num_layers or any(here[joint.segment][:end]):
            return False
    solid = [row for row, segment in zip(here, problem.segments, strict=True) if segment.beside is None]
    return problem.allow_empty_stages or all(any(row[v] for row in solid) for v in virtual)


def keeps_order_of_kinds(problem, placement):
    """Whether the layers of every stack run as ``kinds[1]``, ``kinds[2]`` and so on, and ``kinds[0]`` last."""
    for group in problem.groups:
        for v in range(problem.num_virtual):
            places = [
                place for k in group for place, kind in enumerate(problem.segments[k].order) if placement[k][kind][v]
            ]
            if places != sorted(places):
                return False
    return True


def fastest(problem):
    """Return the least step of all placements that fit, or None; "too many" beyond MOST_TRIED."""
    virtual = problem.num_virtual
    cells = [len(segment.kinds) * virtual for segment in problem.segments]
    every = [spread(segment.num_layers, cell) for segment, cell in zip(problem.segments, cells, strict=True)]
    total = 1
    for rows in every:
        total *= len(rows)
    if total > 6 * MOST_TRIED:
        return "too many"
    best = None
    tried = 0
    for rows in itertools.product(*every):
        placement = tuple(tuple(row[i : i + virtual] for i in range(0, len(row), virtual)) for row in rows)
        here = [[sum(column) for column in zip(*kinds, strict=True)] for kinds in placement]
        if not is_placement(problem, here) or not keeps_order_of_kinds(problem, placement):
            continue
        if any(a > b for a, b in zip(stage_memory(problem, placement), problem.memory_limit, strict=True)):
            continue
        tried += 1
        if tried > MOST_TRIED:
            return "too many"
        step = time_of(problem, placement)
        best = step if best is None else min(best, step)
    return best


@pytest.mark.parametrize("shape", SHAPES)
def test_all_placements(shape):
    drawn = random.Random(f"{shape}")
    compared = fitted = 0
    while compared < NUM_PER_SHAPE:
        problem = random_problem(drawn, *shape, most_rounds=drawn.choice([3, 3, 1_000]))
        expected = fastest(problem)
        if expected == "too many":
            continue
        compared += 1
        found = State(problem=problem, limits=Limits())
        if expected is None:
            with pytest.raises(InfeasiblePlan):
                enumerate_all(found)
            with pytest.raises(InfeasiblePlan):
                solve(problem)
            continue
        fitted += 1
        assert enumerate_all(found)
        assert found.step_time == expected == time_of(problem, found.placement)
        used = stage_memory(problem, found.placement)
        assert all(a <= b for a, b in zip(used, problem.memory_limit, strict=True))
        solution = solve(problem)
        assert (solution.status, solution.step_time) == ("optimal", expected)
        if solution.rounds == 0:
            with pytest.raises(NoneBelow):
                solve(problem, below=int(expected))
    assert fitted > NUM_PER_SHAPE // 4


def test_few_of_many_placements_are_replayed(monkeypatch):
    """What makes half a second enough for 10^5 placements: critical paths known rule out all but a few."""
    drawn = random.Random(0)
    num_large, replayed = 0, []
    replay = BatchSimulator.replay
    monkeypatch.setattr(
        BatchSimulator,
        "replay",
        lambda own, forward, *rest: replayed.append(len(forward)) or replay(own, forward, *rest),
    )
    while num_large < 6:
        shape = drawn.choice([("1f1b", 4, 1), ("1f1b", 5, 1), ("interleaved", 2, 2), ("interleaved", 2, 3)])
        replayed.clear()
        problem = random_problem(drawn, *shape, most_layers=9)
        try:
            number = enumerate_all(State(problem=problem, limits=Limits()))
        except InfeasiblePlan:
            continue
        if number > 2_000:
            num_large += 1
            assert 0 < sum(replayed) < 0.2 * number
