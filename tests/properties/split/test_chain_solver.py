"""The search of chains finds what the integer solver finds, blocks beside layers and several kinds included."""

import itertools
import random
import time
from dataclasses import replace

import pytest
from how_many import how_many

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, solve, solver, stage_memory, step_of
from mindspeed_autoparallel.planner.split.analysis import least_excess
from mindspeed_autoparallel.planner.split.bounds.divisions import halves
from mindspeed_autoparallel.planner.split.bounds.paths import Paths
from mindspeed_autoparallel.planner.split.model.ranges import Chain
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.planner.split.state import LONGEST, Limits, State
from mindspeed_autoparallel.planner.split.strategies import chain_solver
from mindspeed_autoparallel.planner.split.strategies.chain_solver import first_cuts, search_chain

NUM_PROBLEMS = how_many(50, 150)


def random_chain(drawn):
    stages = drawn.randint(1, 5)
    sizes = [1, drawn.randint(2, 5), 1, 1, drawn.randint(stages, 9), 1]
    segments = []
    for index, size in enumerate(sizes):
        is_layer = index in (1, 4)
        kinds = [LayerKind(name="none", memory=tuple(drawn.randint(3, 9) for _ in range(stages)))]
        for name in ("selective", "full")[: drawn.randint(0, 2) if is_layer else 0]:
            kinds.append(
                LayerKind(
                    name=name,
                    extra_backward=drawn.randint(1, 9),
                    transient=drawn.choice([0, 2, 4]),
                    memory=tuple(drawn.randint(1, size) for size in kinds[0].memory),
                )
            )
        segments.append(
            Segment(
                name=f"m{index}",
                num_layers=size,
                forward=drawn.randint(1, 20),
                kinds=tuple(kinds),
                backward=0 if index < 2 and drawn.random() < 0.3 else drawn.randint(1, 40),
                predecessors=(index - 1,) if index else (),
                beside=None if is_layer else 1 if index < 3 else 4,
            )
        )
    average = 6 * sum(sizes) // stages
    return SplitProblem(
        segments=tuple(segments),
        num_stages=stages,
        num_microbatches=drawn.randint(1, 12),
        memory_limit=tuple(drawn.randint(average // 2, 2 * average) for _ in range(stages)),
        link=(drawn.randint(0, 5),) * (stages - 1),
        per_operation=drawn.randint(0, 2),
        schedule=drawn.choice(["1f1b", "1f1b", "gpipe"]),
        sends=drawn.choice(["eager", "eager", "blocking"]),
        allow_empty_stages=drawn.random() < 0.2,
    )


def outcome(problem):
    try:
        found = solve(problem)
    except InfeasiblePlan:
        return None
    assert found.status == "optimal"
    assert step_of(problem, found.placement).step_time == found.step_time == found.lower_bound
    assert all(a <= b for a, b in zip(stage_memory(problem, found.placement), problem.memory_limit, strict=True))
    return found.step_time


def test_chains_get_the_integer_solvers_optimum(monkeypatch):
    drawn = random.Random(7)
    problems = [random_chain(drawn) for _ in range(NUM_PROBLEMS)]
    searched = [outcome(problem) for problem in problems]
    monkeypatch.setattr(solver, "is_chain", lambda problem: False)
    assert searched == [outcome(problem) for problem in problems]
    assert sum(time is None for time in searched) < NUM_PROBLEMS // 2 < sum(time is not None for time in searched)


def test_host_time_per_operation_does_not_make_the_only_plan_impossible(monkeypatch):
    """With one stage a step is all its work and all its operations: longer than the work alone."""
    kinds = (
        LayerKind(name="none", memory=(6,)),
        # What the simple splits choose, and what then does not fit: they leave nothing to fall back on.
        LayerKind(name="selective", extra_backward=1, memory=(2,), transient=5),
        LayerKind(name="full", extra_backward=3, memory=(4,)),
    )
    problem = SplitProblem(
        segments=(Segment(name="m", num_layers=1, forward=8, backward=28, kinds=kinds),),
        num_stages=1,
        num_microbatches=4,
        memory_limit=(5,),
        per_operation=5,
    )
    for is_chain in (solver.is_chain, lambda problem: False):
        monkeypatch.setattr(solver, "is_chain", is_chain)
        assert outcome(problem) == 4 * (8 + 28 + 3 + 2 * 5)


@pytest.mark.parametrize("only_means", [False, True])
def test_wherever_time_runs_out_the_bound_holds_and_the_plan_is_one(monkeypatch, only_means):
    drawn = random.Random(11)
    problems = [random_chain(drawn) for _ in range(how_many(10, 25))]
    optima = [outcome(problem) for problem in problems]
    monkeypatch.setitem(vars(SETTINGS), "paths_slice", 1)
    if only_means:
        leave_the_search_to_halves(monkeypatch)
    for problem, optimum in zip(problems, optima, strict=True):
        for looks in (1, 3, 7, 20, 60):
            clock = itertools.count()
            with monkeypatch.context() as stopped_clock:
                stopped_clock.setattr(time, "monotonic", lambda clock=clock: next(clock))
                stopped = State(problem=problem, limits=Limits(time_limit_s=looks))
                try:
                    search_chain(stopped)
                except InfeasiblePlan:
                    assert optimum is None
                    continue
            assert stopped.lower_bound <= optimum <= stopped.step_time
            assert step_of(problem, stopped.placement).step_time == stopped.step_time


def test_the_same_problem_gets_the_same_plan():
    problem = random_chain(random.Random(3))
    assert solve(problem).placement == solve(problem).placement


def leave_the_search_to_halves(monkeypatch):
    """Small problems end before any query is divided: here no other part may find or prove the result first."""
    monkeypatch.setitem(vars(SETTINGS), "chain_beam", 0)
    monkeypatch.setitem(vars(SETTINGS), "chain_quick_effort", -1)
    monkeypatch.setitem(vars(SETTINGS), "chain_first_effort", 1)
    monkeypatch.setitem(vars(SETTINGS), "chain_moves_most_tried", 0)


def test_search_by_branching_on_the_bottleneck_finds_the_same_optimum(monkeypatch):
    drawn = random.Random(19)
    problems = [random_chain(drawn) for _ in range(how_many(25, 60))]
    whole = [outcome(problem) for problem in problems]
    branched = []
    monkeypatch.setattr(chain_solver, "halves", lambda some: branched.append(halves(some)) or branched[-1])
    leave_the_search_to_halves(monkeypatch)
    monkeypatch.setitem(vars(SETTINGS), "chain_branching_effort", 0)
    assert whole == [outcome(problem) for problem in problems]
    assert sum(two is not None for two in branched) > how_many(3, 8)


@pytest.mark.parametrize("most_labels", [1, 7])
def test_small_blocks_of_labels_change_nothing(monkeypatch, most_labels):
    drawn = random.Random(5)
    problems = [random_chain(drawn) for _ in range(15)]
    whole = [outcome(problem) for problem in problems]
    monkeypatch.setitem(vars(SETTINGS), "paths_most_labels", most_labels)
    assert whole == [outcome(problem) for problem in problems]


def whole_paths(paths):
    """Layers done after each stage, for every path."""
    arcs = [list(zip(r.start.tolist(), r.end.tolist(), strict=True)) for r in paths.ranges]
    found = [((), 0)]
    for stage in arcs:
        found = [((*ends, high), high) for ends, node in found for low, high in stage if low == node]
    return {ends for ends, node in found if node == paths.num_nodes - 1}


def test_branching_on_the_bottleneck_each_plan_is_in_a_half_and_no_faster_than_the_cuts_of_its_half():
    drawn = random.Random(17)
    divided = 0
    for _ in range(how_many(16, 40)):
        problem = random_chain(drawn)
        chain = Chain(problem)
        paths = Paths(chain.ranges(2 * LONGEST), chain.num_layers)
        for stage, ranges in enumerate(paths.ranges):
            chain.recompute(stage, ranges)
        paths.cuts = first_cuts(problem)
        plans = whole_paths(paths)
        if not plans or len(plans) > 300:
            continue
        steps = {ends: step_of(problem, chain.placement(list(ends))) for ends in plans}
        known = dict(paths.cuts)
        pending, leaves = [(paths, plans)], 0
        while pending and leaves < 20:
            some, held = pending.pop()
            two = halves(some)
            if two is None:
                leaves += 1
                continue
            below, above = two
            smaller = whole_paths(below) & held
            for ends in held - smaller:
                for cut in above.cuts:
                    assert value(chain, ends, cut) <= steps[ends].step_time
            divided += 0 < len(smaller) < len(held)
            pending += [(below, smaller), (above, held - smaller)]
        assert paths.cuts == known
    assert divided > how_many(8, 20)


def value(chain, ends, cut):
    """Of a plan under a cut."""
    total = cut[2]
    for stage, (start, end) in enumerate(itertools.pairwise((0, *ends))):
        forward, backward, tail = chain.times(stage, start, end)
        total += cut[0][stage] * forward + cut[1][stage] * backward + (cut[3] == stage) * tail
    return total


def test_hundreds_of_layers_with_blocks_of_their_own_are_proved_in_tight_memory():
    """256 + 256 layers, the first and last of each module with costs of their own, 0.4 % above the least memory."""
    num, segments = 8, []
    for forward, saved, count in ((18, 180, 256), (42, 620, 256)):
        first = len(segments)
        for number, scale in ((1, 0.5), (count - 2, 1.0), (1, 0.7)):
            size = int(saved * scale)
            lean = tuple(size for _ in range(num))
            kinds = (
                LayerKind(name="none", memory=tuple(size * (num - stage) for stage in range(num))),
                LayerKind(name="full", memory=lean, extra_backward=int(forward * scale)),
            )
            segments.append(
                Segment(
                    name="layer",
                    num_layers=number,
                    forward=int(forward * scale),
                    backward=2 * int(forward * scale),
                    kinds=kinds,
                    predecessors=(len(segments) - 1,) if segments else (),
                    continues=len(segments) > first,
                )
            )
    problem = SplitProblem(segments=tuple(segments), num_stages=num, num_microbatches=64, memory_limit=(0,) * num)
    least = least_excess(problem)
    assert least > 0
    with pytest.raises(InfeasiblePlan):
        solve(replace(problem, memory_limit=(least - 1,) * num), time_limit_s=60)
    found = solve(replace(problem, memory_limit=(least * 1004 // 1000,) * num), time_limit_s=60)
    assert found.status == "optimal"
    assert any(any(row) for rows in found.placement for row in rows[1:])


@pytest.mark.parametrize("scarce", [1.0, 0.5])
def test_blocks_and_whole_encoders_without_time_are_proved(scarce):
    """Embedding, projector and a frozen encoder may take no time at all, and still hold memory."""
    num, segments = 8, []
    for forward, saved, count in ((0, 50, 1), (0, 90, 32), (0, 10, 1), (40, 300, 40), (0, 200, 1)):
        whole = LayerKind(name="none", memory=tuple(saved * (num - stage) for stage in range(num)))
        lean = LayerKind(name="full", memory=(saved // 4,) * num, extra_backward=forward)
        segments.append(
            Segment(
                name=f"s{len(segments)}",
                num_layers=count,
                forward=forward,
                backward=2 * forward,
                kinds=(whole, lean),
                predecessors=(len(segments) - 1,) if segments else (),
            )
        )
    limit = int(scarce * sum(s.num_layers * s.kinds[0].memory[0] for s in segments) / num)
    found = solve(
        SplitProblem(segments=tuple(segments), num_stages=num, num_microbatches=32, memory_limit=(limit,) * num),
        time_limit_s=60,
    )
    assert found.status == "optimal"
    if scarce < 1:
        assert any(any(row) for rows in found.placement for row in rows[1:])
