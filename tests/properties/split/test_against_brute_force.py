"""The solver equals the enumeration of every plan on random small problems."""

import itertools
import random
from dataclasses import replace

import pytest
from how_many import how_many

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.split import Joint, LayerKind, Segment, SplitProblem, solve, stage_memory, step_of

SHAPES = [("1f1b", 1, 1), ("1f1b", 2, 1), ("1f1b", 3, 1), ("gpipe", 2, 1), ("gpipe", 3, 1), ("interleaved", 2, 2)]
NUM_PER_SHAPE, NUM_JOINED = how_many(30, 100), how_many(20, 60)


def random_problem(drawn, schedule, stages, chunks):
    microbatches = drawn.choice([2, 4]) if schedule == "interleaved" else drawn.randint(1, 6)
    virtual = stages * chunks
    side_by_side = drawn.random() < 0.3
    segments = []
    for index in range(drawn.randint(2, 3) if side_by_side else drawn.randint(1, 3)):
        frozen = drawn.random() < 0.25
        kinds = [LayerKind(name="none", memory=tuple(drawn.randint(4, 12) for _ in range(virtual)))]
        for name in ("selective", "full")[: drawn.randint(0, 2) if len(segments) == 0 else drawn.randint(0, 1)]:
            memory = tuple(drawn.randint(1, size) for size in kinds[0].memory)
            extra, transient = drawn.randint(0, 9), drawn.choice([0, 0, 3])
            kinds.append(LayerKind(name=name, extra_backward=extra, memory=memory, transient=transient))
        before = (
            tuple(range(index)) if side_by_side and index == 2 else (() if side_by_side or not index else (index - 1,))
        )
        segments.append(
            Segment(
                name=f"m{index}",
                num_layers=drawn.randint(1, 3),
                forward=drawn.randint(0, 20),
                backward=0 if frozen else drawn.randint(0, 40),
                kinds=tuple(kinds),
                predecessors=before,
            )
        )
    layers = sum(segment.num_layers for segment in segments)
    if drawn.random() < 0.3:
        # The output layer sits with the last module's last layer.
        segments.append(
            Segment(
                name="post",
                num_layers=1,
                forward=drawn.randint(0, 20),
                backward=drawn.randint(0, 40),
                kinds=(LayerKind(name="none", memory=tuple(drawn.randint(1, 5) for _ in range(virtual))),),
                predecessors=tuple(range(len(segments))),
                beside=len(segments) - 1,
            )
        )
    sends = drawn.choice(["eager", "eager", "blocking", "freed", "overlapped", "flushed"])
    if schedule != "interleaved":
        sends = drawn.choice(["eager", "eager", "blocking"])
    return SplitProblem(
        segments=tuple(segments),
        num_stages=stages,
        num_microbatches=microbatches,
        schedule=schedule,
        num_chunks=chunks,
        memory_limit=tuple(drawn.randint(8, 40) for _ in range(stages)),
        link=tuple(drawn.randint(0, 5) for _ in range(virtual - 1)),
        allow_empty_stages=layers < virtual,
        sends=sends,
        per_operation=drawn.choice([0, 0, 1, 5]),
    )


def brute_force(problem):
    """The least step time over every placement, or None."""
    virtual = problem.num_virtual
    choices = []
    for segment in problem.segments:
        cells = len(segment.kinds) * virtual
        choices.append(
            [
                tuple(row[q * virtual : (q + 1) * virtual] for q in range(len(segment.kinds)))
                for row in itertools.product(range(segment.num_layers + 1), repeat=cells)
                if sum(row) == segment.num_layers
            ]
        )
    best, seen = None, {}
    for placement in itertools.product(*choices):
        here = [[sum(column) for column in zip(*rows, strict=True)] for rows in placement]
        solid = [row for row, segment in zip(here, problem.segments, strict=True) if segment.beside is None]
        if not problem.allow_empty_stages and not all(map(sum, zip(*solid, strict=True))):
            continue
        if any(
            here[k][v] > here[segment.beside][v]
            for k, segment in enumerate(problem.segments)
            if segment.beside is not None
            for v in range(virtual)
        ):
            continue
        if any(
            max(v for v in range(virtual) if here[before][v]) > min(v for v in range(virtual) if here[k][v])
            for k, segment in enumerate(problem.segments)
            for before in segment.predecessors
        ):
            continue
        if any(a > b for a, b in zip(stage_memory(problem, placement), problem.memory_limit, strict=True)):
            continue
        ends = [max(v for v in range(virtual) if row[v]) for row in here]
        if any(here[joint.segment][ends[joint.before]] < joint.num_layers for joint in problem.joints):
            continue
        key = tuple(
            tuple(
                sum(
                    row[v] * t
                    for s, rows in zip(problem.segments, placement, strict=True)
                    for row, t in zip(rows, times(s), strict=True)
                )
                for v in range(virtual)
            )
            for times in (
                lambda s: [s.forward] * len(s.kinds),
                lambda s: [s.backward + k.extra_backward for k in s.kinds],
            )
        )
        if key not in seen:
            seen[key] = step_of(problem, placement).step_time
            best = seen[key] if best is None else min(best, seen[key])
    return best


def joined(drawn, problem):
    """The problem with the end of a segment and first layers of one that waits for it on one stage; None: it cannot."""
    pairs = [(before, k) for k, s in enumerate(problem.segments) if s.beside is None for before in s.predecessors]
    if not pairs:
        return None
    before, segment = drawn.choice(pairs)
    number = drawn.randint(1, problem.segments[segment].num_layers)
    joint = Joint(before=before, segment=segment, num_layers=number)
    parts = sum(s.num_layers for s in problem.segments if s.beside is None) - number
    if parts < problem.num_virtual and not problem.allow_empty_stages:
        with pytest.raises(ConfigError, match=f"more than the {parts} parts that .* layers can be cut into"):
            replace(problem, joints=(joint,))
        return None
    return replace(problem, joints=(joint,))


@pytest.mark.parametrize("with_joints", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_optimum_equals_brute_force(shape, with_joints, enumerating):
    """``with_joints``: deepstack, where features of an encoder's layers reach no other stage."""
    drawn = random.Random(f"{shape}")
    compared = 0
    while compared < (NUM_JOINED if with_joints else NUM_PER_SHAPE):
        problem = random_problem(drawn, *shape)
        size = 1
        for segment in problem.segments:
            size *= (segment.num_layers + 1) ** (len(segment.kinds) * problem.num_virtual)
        if size > 3_000:
            continue
        if with_joints:
            problem = joined(drawn, problem)
            if problem is None:
                continue
        expected = brute_force(problem)
        compared += 1
        # Larger problems are searched: one in five of these is, too.
        for enumerated in (True, False) if compared % 5 == 0 else (True,):
            enumerating(enumerated)
            if expected is None:
                with pytest.raises(InfeasiblePlan):
                    solve(problem)
                continue
            solution = solve(problem)
            assert solution.status == "optimal"
            assert solution.step_time == solution.lower_bound == expected
            step = step_of(problem, solution.placement, with_timeline=True)
            assert sum(duration for _, duration in step.critical_path) == step.step_time == expected
            assert stage_memory(problem, solution.placement) == solution.stage_memory
