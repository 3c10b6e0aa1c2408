"""Placements, their step time and memory, and the solver's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.linear import memory_rows
from mindspeed_autoparallel.planner.split.model.problem import PostPipelineTime, SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array, RecomputeChoice, Rows
from mindspeed_autoparallel.schedule import (
    BatchSimulator,
    Program,
    ProgramSizes,
    SimulatedStep,
    StepTimes,
    check_program,
    make_program,
    simulate_folded,
)

Placement = tuple[tuple[tuple[int, ...], ...], ...]
"""``placement[segment][kind][virtual stage]``: number of layers."""
Counts = Sequence[Sequence[Sequence[float]]]
"""Numbers of layers like ``Placement``; may be fractions."""


class NoneBelow(InfeasiblePlan):
    """It is proved that no plan is faster than the given limit."""


class StoppedEarly(InfeasiblePlan):
    """Time or effort ended before a plan was found or its absence proved."""

    lower_bound: int = 0
    """Lower bound of the step time of all plans."""


@dataclass(frozen=True, kw_only=True)
class SplitSolution:
    """The best plan found.

    ``status`` is ``optimal`` if ``lower_bound`` equals ``step_time``, and ``feasible`` if a limit ended the search.
    """

    status: str
    placement: Placement
    step_time: int
    lower_bound: int
    stage_memory: tuple[int, ...]
    rounds: int
    solve_seconds: float
    cuts: tuple[Cut, ...] = ()
    """Cuts found, for problems with virtual stages; they also hold under other memory limits."""

    def layers(self, segment: int) -> tuple[int, ...]:
        """Return the number of layers of a segment, by virtual stage."""
        return tuple(map(sum, zip(*self.placement[segment], strict=True)))


def tick_of(problem: SplitProblem) -> int:
    """Return the time unit: the largest value that divides every step time."""
    unit = gcd(problem.per_operation, *problem.link)
    for segment in problem.segments:
        unit = gcd(unit, segment.forward, segment.backward, *(kind.extra_backward for kind in segment.kinds))
    for tail in problem.tails:
        unit = gcd(unit, tail.fixed, *tail.by_segment)
    return unit or 1


def longest_step(problem: SplitProblem) -> int:
    """Return an upper bound of the step time: all operations and messages of all microbatches in sequence."""
    work = sum(
        s.num_layers * (s.forward + s.backward + max(kind.extra_backward for kind in s.kinds)) for s in problem.segments
    )
    work += 2 * sum(problem.link) + 2 * problem.num_virtual * problem.per_operation
    tail_time = max(
        (
            tail.fixed + sum(s.num_layers * max(0, t) for s, t in zip(problem.segments, tail.by_segment, strict=True))
            for tail in problem.tails
        ),
        default=0,
    )
    return work * problem.num_microbatches * problem.num_chunks + tail_time


def stage_times(problem: SplitProblem, placement: Counts) -> tuple[list[float], list[float]]:
    """Return forward and backward times of one microbatch by virtual stage; counts may be fractions."""
    forward: list[float] = [0] * problem.num_virtual
    backward: list[float] = [0] * problem.num_virtual
    for segment, rows in zip(problem.segments, placement, strict=True):
        for kind, row in zip(segment.kinds, rows, strict=True):
            for v, count in enumerate(row):
                if count:
                    forward[v] += count * segment.forward
                    backward[v] += count * (segment.backward + kind.extra_backward)
    return forward, backward


def program_of(problem: SplitProblem) -> Program:
    """Return the order of every stage. Raises ``ConfigError`` if the schedule cannot run so many microbatches."""
    return make_program(*_program_sizes(problem))


def check_schedule(problem: SplitProblem) -> None:
    """Raise ``ConfigError`` if the schedule cannot run so many microbatches."""
    check_program(*_program_sizes(problem))


def _program_sizes(problem: SplitProblem) -> ProgramSizes:
    return (
        problem.schedule,
        problem.num_stages,
        problem.num_microbatches,
        problem.num_chunks,
        problem.microbatch_group_size if problem.schedule == "interleaved" else 0,
        problem.paired,
    )


def batch_simulator(problem: SplitProblem) -> BatchSimulator:
    """Return a simulator of many placements at once; creating it sorts the schedule's events, which is slow."""
    return BatchSimulator(program_of(problem), problem.sends, problem.link, problem.per_operation)


def step_of(problem: SplitProblem, placement: Counts, *, with_timeline: bool = False) -> SimulatedStep:
    """Simulate the pipeline of a placement, without tails; integer times give exact results."""
    return step_at(problem, *stage_times(problem, placement), with_timeline=with_timeline)


def step_at(
    problem: SplitProblem, forward: Sequence[float], backward: Sequence[float], *, with_timeline: bool = False
) -> SimulatedStep:
    """Simulate the pipeline with these forward and backward times of virtual stages."""
    times = StepTimes(forward=forward, backward=backward, link=problem.link, per_operation=problem.per_operation)
    return simulate_folded(_program_sizes(problem), times, problem.sends, with_timeline=with_timeline)


def longest_tail(problem: SplitProblem, placement: Counts) -> tuple[int, float]:
    """Return the stage with the longest tail, and its ticks; (-1, 0) without tails. Counts may be fractions."""
    if not problem.tails:
        return -1, 0
    held = numpy.array([[sum(counts) for counts in zip(*kinds, strict=True)] for kinds in placement])
    stage, length = tails_of(problem, held.T[None])
    return int(stage[0]), length[0].item()


def tails_of(problem: SplitProblem, held: Array) -> tuple[Array, Array]:
    """Return the stage with the longest tail (-1 without tails) and its ticks, for many placements.

    ``held``: layers, ``[placement, virtual stage, segment]``.
    """
    if not problem.tails:
        return numpy.full(len(held), -1), numpy.zeros(len(held), dtype=numpy.int64)
    by_rank = held.reshape(len(held), problem.num_chunks, problem.num_stages, held.shape[2]).sum(axis=1)
    length = tail_lengths(problem.tails_at(1), by_rank)
    length[:, 0] = tail_lengths(problem.tails, by_rank[:, 0])
    return length.argmax(axis=1), length.max(axis=1)


def tail_lengths(tails: Sequence[PostPipelineTime], held: Array) -> Array:
    """Return the ticks of the longest row of ``tails`` for the layers ``held[..., segment]``, at least 0."""
    length: Array = numpy.zeros(held.shape[:-1], dtype=held.dtype)
    for tail in tails:
        ticks = numpy.array(tail.by_segment)
        some = held[..., ticks != 0].any(axis=-1)
        length = numpy.maximum(length, held @ ticks + numpy.where(some, tail.fixed, 0))
    return length


def time_of(problem: SplitProblem, placement: Counts) -> float:
    """Return the step time: the pipeline and the longest tail."""
    return step_of(problem, placement).step_time + longest_tail(problem, placement)[1]


def fits(problem: SplitProblem, placement: Placement) -> bool:
    """Return whether every stage's peak memory is within its limit."""
    return all(a <= b for a, b in zip(stage_memory(problem, placement), problem.memory_limit, strict=True))


def held_times(choice: RecomputeChoice, stage: int, held: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return forward, backward (with the least recomputation) and tail times of a stage with the layers ``held`` (by
    segment); ``None`` if it cannot hold them."""
    problem = choice.problem
    segments = problem.segments
    if any(s.beside is not None and count > held[s.beside] for count, s in zip(held, segments, strict=True)):
        return None
    if not problem.allow_empty_stages and not any(n for n, s in zip(held, segments, strict=True) if s.beside is None):
        return None
    kinds = choice.best(stage, held)
    if kinds is None:
        return None
    forward = sum(count * segment.forward for count, segment in zip(held, segments, strict=True))
    backward = sum(count * segment.backward for count, segment in zip(held, segments, strict=True))
    return forward, backward + kinds[0], int(tail_lengths(problem.tails_at(stage), numpy.array(held)))


def placement_that_holds(choice: RecomputeChoice, held: Array) -> Placement:
    """Return the placement of the layers ``held[stage, segment]``, which must fit, with the least recomputation."""
    columns: list[Rows] = []
    for stage, row in enumerate(held.tolist()):
        kinds = choice.best(stage, tuple(row))
        assert kinds is not None  # it fits
        columns.append(kinds[1])
    return placement_of(columns)


def placement_of(columns: Sequence[Sequence[Sequence[int]]]) -> Placement:
    """Return the placement for numbers of layers by virtual stage, segment and kind."""
    return tuple(tuple(zip(*rows, strict=True)) for rows in zip(*columns, strict=True))


def stage_memory(problem: SplitProblem, placement: Placement) -> tuple[int, ...]:
    """Return peak memory by stage, in the problem's unit."""
    num = problem.num_stages
    peaks: list[int] = []
    for stage in range(num):
        used = max(
            sum(term.size * placement[term.segment][term.kind][term.stage] for term in row)
            for row in memory_rows(problem, stage)
        )
        held = range(stage, problem.num_virtual, num)
        transients = [
            kind.transient
            for segment, rows in zip(problem.segments, placement, strict=True)
            for kind, row in zip(segment.kinds, rows, strict=True)
            if any(row[v] for v in held)
        ]
        peaks.append(used + max(transients, default=0))
    return tuple(peaks)
