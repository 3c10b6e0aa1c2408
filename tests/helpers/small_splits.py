"""Random split problems of every kind that the model admits, small enough to enumerate."""

from __future__ import annotations

import random

from mindspeed_autoparallel.planner.split import Joint, LayerKind, PostPipelineTime, Segment, SplitProblem
from mindspeed_autoparallel.planner.split.model.problem import fullest_moments
from mindspeed_autoparallel.schedule import make_program
from mindspeed_autoparallel.schedule.programs import group_sizes
from mindspeed_autoparallel.spec.layout import SENDS

ONE_CHUNK_SENDS = ("eager", "eager", "blocking")


def random_problem(
    drawn: random.Random,
    schedule: str,
    stages: int,
    chunks: int,
    *,
    most_layers: int = 3,
    most_segments: int = 3,
    most_rounds: int = 3,
) -> SplitProblem:
    """Draw a problem of one shape: a chain, branches, joints, a block beside, stacks, tails, up to three kinds of
    recomputation, tight to loose memory, and ``most_rounds`` microbatches a stage at most."""
    virtual, several = stages * chunks, chunks > 1
    microbatches = stages * round(most_rounds ** drawn.random()) if several else drawn.randint(1, stages * most_rounds)
    group = drawn.choice([0, *group_sizes(stages, microbatches)[:6]]) if schedule == "interleaved" else 0
    paired = drawn.random() < 0.1 and (several or (stages == 1 and schedule == "1f1b"))
    sizes = (schedule, stages, microbatches, chunks, (group or stages) if several else 0, paired)
    segments: list[Segment] = []
    for index in range(drawn.randint(1, most_segments)):
        segments.append(_segment(drawn, segments, index, virtual, several, drawn.randint(1, most_layers)))
    joints: tuple[Joint, ...] = ()
    if len(segments) > 1 and 0 in segments[1].predecessors and drawn.random() < 0.3:
        joints = (Joint(before=0, segment=1, num_layers=drawn.randint(1, segments[1].num_layers)),)
    layers = sum(segment.num_layers for segment in segments) - sum(joint.num_layers for joint in joints)
    if drawn.random() < 0.4:
        kinds = (LayerKind(name="none", memory=(2,) * virtual, saved=3 if several else 0),)
        last = len(segments) - 1
        segments.append(
            Segment(name="post", num_layers=1, forward=7, backward=9, kinds=kinds, predecessors=(last,), beside=last)
        )
    moments = fullest_moments(make_program(*sizes)) if several else ()
    most = max((max(moment) for rank in moments for moment in rank), default=0)
    whole = sum(s.num_layers * (max(s.kinds[0].memory) + s.kinds[0].saved * most) for s in segments)
    return SplitProblem(
        segments=tuple(segments),
        num_stages=stages,
        num_microbatches=microbatches,
        schedule=schedule,
        num_chunks=chunks,
        microbatch_group_size=group,
        paired=paired,
        memory_limit=tuple(int(whole / stages * drawn.uniform(0.5, 1.8)) + 3 for _ in range(stages)),
        link=tuple(drawn.randint(0, 5) for _ in range(virtual - 1)),
        allow_empty_stages=layers < virtual,
        sends=drawn.choice(SENDS if several else ONE_CHUNK_SENDS),
        per_operation=drawn.choice([0, 1]),
        tails=_tails(drawn, len(segments)) if drawn.random() < 0.5 else (),
        in_flight=moments,
        joints=joints,
    )


def _segment(
    drawn: random.Random, before: list[Segment], index: int, virtual: int, several: bool, layers: int
) -> Segment:
    """Draw a segment: a branch, a successor, or the next layers of the stack before it."""
    continues = bool(before) and drawn.random() < 0.2
    number = len(before[-1].kinds) if continues else drawn.choice([1, 2, 2, 3])
    size, kinds = drawn.randint(4, 12), list[LayerKind]()
    for place, name in enumerate(("none", "full", "part")[:number]):
        each = drawn.randint(1, size) if place else size
        kinds.append(
            LayerKind(
                name=name,
                extra_backward=drawn.randint(0, 9) if place else 0,
                # With several chunks the problem counts the microbatches in flight.
                memory=(drawn.randint(0, 6),) * virtual
                if several
                else tuple(each * drawn.randint(1, 2) for _ in range(virtual)),
                saved=each if several else 0,
                transient=drawn.choice([0, 0, 3]),
            )
        )
    return Segment(
        name=f"m{index}",
        num_layers=layers,
        forward=drawn.randint(0, 20),
        backward=drawn.choice([0, drawn.randint(0, 40), drawn.randint(0, 40)]),
        kinds=tuple(kinds),
        predecessors=(index - 1,) if continues else tuple(k for k in range(index) if drawn.random() < 0.5),
        continues=continues,
    )


def _tails(drawn: random.Random, segments: int) -> tuple[PostPipelineTime, ...]:
    return tuple(
        PostPipelineTime(
            by_segment=tuple(drawn.randint(-2, 9) for _ in range(segments)),
            fixed=drawn.randint(0, 9),
            first_only=drawn.random() < 0.3,
        )
        for _ in range(drawn.randint(1, 2))
    )
