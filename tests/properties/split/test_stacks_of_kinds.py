"""Stacks of layers of several kinds: the solver equals the enumeration of every split and every number recomputed.

The enumeration knows layers by their place and recomputes the first of a stage; segments and kinds are the solver's.
"""

import itertools
import random
import time
from dataclasses import replace

import pytest

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.split import LayerKind, Segment, SplitProblem, solve
from mindspeed_autoparallel.planner.split.analysis import least_excess
from mindspeed_autoparallel.planner.split.heuristics import baselines as simple_splits
from mindspeed_autoparallel.planner.split.model.recompute_choice import RecomputeChoice
from mindspeed_autoparallel.planner.split.state import Limits, State
from mindspeed_autoparallel.planner.split.strategies.virtual_stages import search_row
from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate

SHAPES = [("1f1b", 1, 1), ("1f1b", 2, 1), ("1f1b", 3, 1), ("gpipe", 2, 1), ("interleaved", 2, 2)]
PATTERNS = [(0, 0, 1, 1, 1), (0, 1, 0, 1, 0), (1, 0, 0, 0, 1), (0, 1, 2, 0, 1), (0, 0, 0, 0, 1, 1)]


def random_stack(drawn, name, virtual, num_ways, start, pattern, frozen):
    """Segments of a stack whose layers follow ``pattern``; the first of them is number ``start`` of the problem."""
    ways = ["none", "full", "selective"][:num_ways]
    kinds_of_layers = []
    for _ in range(max(pattern) + 1):
        plain = LayerKind(name="none", memory=tuple(drawn.randint(4, 12) for _ in range(virtual)))
        others = [
            LayerKind(
                name=way,
                extra_backward=drawn.randint(0, 9),
                transient=drawn.choice([0, 0, 3]),
                memory=tuple(drawn.randint(1, size) for size in plain.memory),
            )
            for way in ways[1:]
        ]
        backward = 0 if frozen else drawn.randint(0, 40)
        kinds_of_layers.append(((plain, *others), drawn.randint(0, 20), backward))
    segments = []
    for kind, row in itertools.groupby(pattern):
        kinds, forward, backward = kinds_of_layers[kind]
        before = start + len(segments) - 1
        segments.append(
            Segment(
                name=f"{name} {len(segments)}",
                num_layers=len(list(row)),
                forward=forward,
                backward=backward,
                kinds=kinds,
                predecessors=(before,) if before >= 0 else (),
                continues=bool(segments),
            )
        )
    return segments


def random_problem(drawn, schedule, stages, chunks):
    virtual = stages * chunks
    segments = random_stack(drawn, "text", virtual, drawn.randint(2, 3), 0, drawn.choice(PATTERNS), frozen=False)
    if drawn.random() < 0.4:
        first = random_stack(drawn, "image", virtual, 2, 0, drawn.choice([(0, 1), (0, 0)]), drawn.random() < 0.5)
        later = [replace(segment, predecessors=(index + len(first) - 1,)) for index, segment in enumerate(segments)]
        segments = [*first, *later]
    return SplitProblem(
        segments=tuple(segments),
        num_stages=stages,
        schedule=schedule,
        num_chunks=chunks,
        num_microbatches=drawn.choice([2, 4]) if schedule == "interleaved" else drawn.randint(1, 6),
        memory_limit=tuple(drawn.randint(12, 45) for _ in range(stages)),
        link=(drawn.randint(0, 5),) * (virtual - 1),
        per_operation=drawn.choice([0, 1]),
    )


def stacks_of(problem):
    """By stack: its layers, each with its times and ways."""
    stacks = []
    for segment in problem.segments:
        if not segment.continues:
            stacks.append([])
        stacks[-1] += [segment] * segment.num_layers
    return stacks


def ways_on_a_stage(problem, v, held):
    """(backward added, memory by layers, transient) of every number of layers under every way, first ones first."""
    options = [(0, 0, 0)]
    for layers in held:
        found = []
        num = len(layers[0].kinds) if layers else 1
        for cuts in itertools.combinations_with_replacement(range(len(layers) + 1), num - 1):
            edges = [0, *cuts, len(layers)]
            chosen = [
                layer.kinds[(place + 1) % num]
                for place, (low, high) in enumerate(itertools.pairwise(edges))
                for layer in layers[low:high]
            ]
            found.append(
                (
                    sum(kind.extra_backward for kind in chosen),
                    sum(kind.memory[v] for kind in chosen),
                    max((kind.transient for kind in chosen), default=0),
                )
            )
        options = [(a[0] + b[0], a[1] + b[1], max(a[2], b[2])) for a in options for b in found]
    return options


def every_split(problem):
    """By stack and virtual stage: the layers there."""
    virtual = problem.num_virtual
    layers = [(index, layer) for index, stack in enumerate(stacks_of(problem)) for layer in stack]
    for cut in itertools.combinations(range(1, len(layers)), virtual - 1):
        edges = [0, *cut, len(layers)]
        yield [
            [[layer for where, layer in layers[low:high] if where == index] for index in range(len(stacks_of(problem)))]
            for low, high in itertools.pairwise(edges)
        ]


def brute_force(problem):
    """The least step, and the least excess of memory; ``None`` for the step where nothing fits."""
    program = make_program(problem.schedule, problem.num_stages, problem.num_microbatches, problem.num_chunks)
    best, least = None, None
    for stages in every_split(problem):
        options = [ways_on_a_stage(problem, v, held) for v, held in enumerate(stages)]
        forward = [sum(layer.forward for layers in held for layer in layers) for held in stages]
        backward = [sum(layer.backward for layers in held for layer in layers) for held in stages]
        by_stage = []
        worst = 0
        for stage in range(problem.num_stages):
            chunks = range(stage, problem.num_virtual, problem.num_stages)
            together = list(itertools.product(*[options[v] for v in chunks]))
            used = [sum(way[1] for way in ways) + max(way[2] for way in ways) for ways in together]
            excess = [size - problem.memory_limit[stage] for size in used]
            worst = max([min(excess), *([worst] if stage else [])])
            by_stage.append(
                {tuple(way[0] for way in ways) for ways, over in zip(together, excess, strict=True) if over <= 0}
            )
        least = worst if least is None else min(least, worst)
        # Of what one chunk adds, more is never better.
        by_stage = [
            [
                way
                for way in ways
                if not any(o != way and all(a <= b for a, b in zip(o, way, strict=True)) for o in ways)
            ]
            for ways in by_stage
        ]
        for ways in itertools.product(*by_stage):
            added = [0] * problem.num_virtual
            for stage, extra in enumerate(ways):
                added[stage :: problem.num_stages] = extra
            times = StepTimes(
                forward=forward,
                backward=[a + b for a, b in zip(backward, added, strict=True)],
                link=problem.link,
                per_operation=problem.per_operation,
            )
            step = simulate(program, times, sends=problem.sends).step_time
            best = step if best is None else min(best, step)
    return best, least


@pytest.mark.parametrize("shape", SHAPES)
def test_the_optimum_is_that_of_every_split_and_number_recomputed(shape):
    drawn = random.Random(f"{shape}")
    solved = 0
    for _ in range(12 if shape[0] == "interleaved" else 40):
        problem = random_problem(drawn, *shape)
        expected, excess = brute_force(problem)
        if shape[0] != "interleaved":
            assert least_excess(problem) == excess
        if expected is None:
            with pytest.raises(InfeasiblePlan):
                solve(problem)
            continue
        found = solve(problem)
        assert (found.status, found.step_time) == ("optimal", expected)
        solved += 1
    assert solved > 3


@pytest.mark.parametrize("shape", [("1f1b", 3, 1), ("interleaved", 2, 2)])
def test_the_layers_recomputed_are_the_first_of_their_stage(shape):
    drawn = random.Random(f"order {shape}")
    checked = 0
    for _ in range(25):
        problem = random_problem(drawn, *shape)
        try:
            placement = solve(problem).placement
        except InfeasiblePlan:
            continue
        checked += check_order(problem, placement)
    assert checked


def check_order(problem, placement):
    """Check every stack's layers on every virtual stage; return how many hold layers of two kinds or more."""
    checked = 0
    for group in problem.groups:
        num = len(problem.segments[group[0]].kinds)
        for v in range(problem.num_virtual):
            row = [q for k in group for q in [*range(1, num), 0] for _ in range(placement[k][q][v])]
            assert row == sorted(row, key=lambda q: (q - 1) % num)
            checked += len(set(row)) > 1
    return checked


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_search_for_a_row_keeps_the_order_of_kinds(seed):
    """It is for problems too large to enumerate; its rows of whole layers recompute any layer of a stage."""
    drawn = random.Random(seed)
    segments = random_stack(drawn, "text", 4, 3, 0, [drawn.randrange(4) for _ in range(10)], frozen=False)
    memory = sum(segment.num_layers * max(segment.kinds[0].memory) for segment in segments)
    problem = SplitProblem(
        segments=tuple(segments),
        num_stages=2,
        schedule="interleaved",
        num_chunks=2,
        num_microbatches=2,
        memory_limit=(round(drawn.uniform(0.25, 0.375) * memory),) * 2,
        link=(1, 1, 1),
    )
    state = State(problem=problem, limits=Limits(time_limit_s=20, effort=0.3))
    search_row(state, time.monotonic() + 20)
    assert check_order(problem, state.placement)


def test_a_kind_that_may_not_come_first_is_not_used_though_it_would_fit():
    """The first layer saves nothing by being recomputed and pays much: the second cannot be recomputed alone."""

    def layer(extra, again, **more):
        return Segment(
            name="layer",
            num_layers=1,
            forward=1,
            backward=1,
            kinds=(LayerKind(name="none", memory=(8,)), LayerKind(name="full", extra_backward=extra, memory=(again,))),
            **more,
        )

    problem = SplitProblem(
        segments=(layer(90, 8), layer(1, 2, predecessors=(0,), continues=True)),
        num_stages=1,
        num_microbatches=1,
        memory_limit=(10,),
    )
    assert RecomputeChoice(problem).best(0, (1, 1)) == (91, ((0, 1), (0, 1)))
    assert solve(problem).step_time == 4 + 91
    apart = replace(problem, segments=(problem.segments[0], replace(problem.segments[1], continues=False)))
    assert solve(apart).step_time == 4 + 1


def test_a_segment_continues_one_of_the_same_kinds_only():
    plain = Segment(name="a", num_layers=1, forward=1, backward=1, kinds=(LayerKind(name="none", memory=(1,)),))
    other = replace(plain, name="b", kinds=(LayerKind(name="full", memory=(1,)),), predecessors=(0,), continues=True)
    for segments in ((plain, other), (replace(plain, continues=True),)):
        with pytest.raises(ConfigError, match="continue"):
            SplitProblem(segments=segments, num_stages=1, num_microbatches=1, memory_limit=(9,))


def test_a_simple_split_looks_at_the_memory_after_a_move_alone(monkeypatch):
    """Before every choice, a stack of many runs took a minute: as many looks as choices times runs."""
    count, looked = 60, []
    kinds = (LayerKind(name="none", memory=(10,)), LayerKind(name="full", extra_backward=1, memory=(2,)))
    segments = tuple(
        Segment(
            name=f"text {number}",
            num_layers=1,
            forward=5,
            backward=5,
            kinds=kinds,
            predecessors=(number - 1,) if number else (),
            continues=number > 0,
        )
        for number in range(count)
    )
    problem = SplitProblem(segments=segments, num_stages=1, num_microbatches=1, memory_limit=(400,))
    whole = simple_splits.stage_memory
    monkeypatch.setattr(simple_splits, "stage_memory", lambda *given: looked.append(1) or whole(*given))
    even, greedy = simple_splits.baselines(problem)
    assert even.fits
    assert even.placement == greedy.placement
    assert sum(rows[1][0] for rows in even.placement) == 25, "just enough is recomputed: 600 - 25 x 8 = 400"
    assert len(looked) <= 2 * (count + 2)
