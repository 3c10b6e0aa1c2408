"""A placement, what it costs, and the solver's answer."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.planner.split.problem import SplitProblem
from mindspeed_autoparallel.schedule import SimulatedStep, StepTimes, make_program, simulate

Placement = tuple[tuple[tuple[int, ...], ...], ...]
"""``placement[segment][kind][virtual stage]``: number of layers."""


@dataclass(frozen=True, kw_only=True)
class SplitSolution:
    """``optimal``: proved, ``lower_bound`` equals ``step_time``; ``feasible``: the time limit came first."""

    status: str
    placement: Placement
    step_time: int
    lower_bound: int
    stage_memory: tuple[int, ...]
    rounds: int
    solve_seconds: float

    def layers(self, segment: int) -> tuple[int, ...]:
        """Layers of a segment by virtual stage."""
        return tuple(map(sum, zip(*self.placement[segment], strict=True)))


def longest_step(problem: SplitProblem) -> int:
    """No plan takes longer: every operation and message of every microbatch in turn."""
    work = sum(
        s.num_layers * (s.forward + s.backward + max(kind.extra_backward for kind in s.kinds)) for s in problem.segments
    )
    work += 2 * sum(problem.link) + 2 * problem.num_virtual * problem.per_operation
    return work * problem.num_microbatches * problem.num_chunks


def stage_times(problem: SplitProblem, placement: object) -> tuple[list[float], list[float]]:
    """Forward and backward time by virtual stage; counts may be fractions."""
    forward, backward = [0.0] * problem.num_virtual, [0.0] * problem.num_virtual
    exact: list[list[float]] = [[0] * problem.num_virtual, [0] * problem.num_virtual]
    for segment, rows in zip(problem.segments, placement, strict=True):  # type: ignore[call-overload]  # nested rows
        for kind, row in zip(segment.kinds, rows, strict=True):
            for v, count in enumerate(row):
                if count:
                    exact[0][v] += count * segment.forward
                    exact[1][v] += count * (segment.backward + kind.extra_backward)
    forward, backward = exact
    return forward, backward


def step_of(problem: SplitProblem, placement: object, *, with_timeline: bool = False) -> SimulatedStep:
    """Simulate a placement (integers: exactly)."""
    forward, backward = stage_times(problem, placement)
    program = make_program(problem.schedule, problem.num_stages, problem.num_microbatches, problem.num_chunks)
    times = StepTimes(forward=forward, backward=backward, link=problem.link, per_operation=problem.per_operation)
    return simulate(program, times, rendezvous=problem.rendezvous, sends=problem.sends, with_timeline=with_timeline)


def stage_memory(problem: SplitProblem, placement: Placement) -> tuple[int, ...]:
    """Peak memory by stage."""
    memory = list(problem.fixed_memory or (0,) * problem.num_stages)
    transient = [0] * problem.num_stages
    for segment, rows in zip(problem.segments, placement, strict=True):
        for kind, row in zip(segment.kinds, rows, strict=True):
            for v, count in enumerate(row):
                if count:
                    stage = v % problem.num_stages
                    memory[stage] += count * kind.memory[v]
                    transient[stage] = max(transient[stage], kind.transient)
    return tuple(base + peak for base, peak in zip(memory, transient, strict=True))
