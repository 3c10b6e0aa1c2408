"""Splits without a solver, even and greedy, for comparison with the optimum."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy

from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.model.solution import Placement, fits, stage_memory, time_of


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A split by a simple rule, with just enough recomputation to fit if that is possible."""

    name: str
    fits: bool
    placement: Placement
    problem: SplitProblem = field(repr=False)

    @functools.cached_property
    def step_time(self) -> int:
        """Return the step time from a replay of the schedule, in the problem's units."""
        return int(time_of(self.problem, self.placement))


def baselines(problem: SplitProblem) -> tuple[Baseline, ...]:
    """Return two baselines: ``even`` spreads layers evenly, ``greedy`` balances forward + backward times of stages."""
    found: list[Baseline] = []
    for name, by_time in (("even", False), ("greedy", True)):
        placement = _fit(problem, _chain(problem, by_time))
        found.append(Baseline(name=name, fits=fits(problem, placement), placement=placement, problem=problem))
    return tuple(found)


def _chain(problem: SplitProblem, by_time: bool) -> list[list[int]]:
    """Return layers by segment and virtual stage, cut where the running weight passes each stage's share."""
    segments = problem.segments
    main = [(k, segment) for k, segment in enumerate(segments) if segment.beside is None]
    layers = [item for item in main for _ in range(item[1].num_layers)]
    weights = [float(segment.forward + segment.backward) if by_time else 1.0 for _, segment in layers]
    total, num = sum(weights) or 1.0, problem.num_virtual
    counts = [[0] * num for _ in segments]
    stage, spent, held = 0, 0.0, 0
    broken = _broken(problem, [k for (k, _) in layers])
    for index, ((k, _), weight) in enumerate(zip(layers, weights, strict=True)):
        must = broken[index:].count(False) <= num - 1 - stage
        late = spent + weight / 2 > total * (stage + 1) / num
        if held and stage < num - 1 and not broken[index] and (must or late):
            stage, held = stage + 1, 0
        counts[k][stage] += 1
        spent += weight
        held += 1
    for k, segment in enumerate(segments):
        if segment.beside is not None:
            used = [v for v, count in enumerate(counts[segment.beside]) if count]
            counts[k][used[0] if k < segment.beside else used[-1]] = 1
    return counts


def _broken(problem: SplitProblem, row: list[int]) -> list[bool]:
    """Return for every layer of ``row`` (its segment) whether no stage may begin there, because a joint spans it."""
    if not problem.joints:
        return [False] * len(row)
    counts: Array = numpy.zeros((len(row), len(problem.segments)), dtype=int)
    for index, k in enumerate(row[:-1], start=1):
        counts[index] = counts[index - 1]
        counts[index, k] += 1
    broken: list[bool] = problem.breaks_joint(counts).tolist()
    return broken


def _fit(problem: SplitProblem, counts: list[list[int]]) -> Placement:
    """Recompute layers, most saved memory per added time first, until every stage fits or nothing is left to save."""
    rows = [
        [list(count), *([0] * problem.num_virtual for _ in segment.kinds[1:])]
        for segment, count in zip(problem.segments, counts, strict=True)
    ]
    choices: list[tuple[float, int, int, int]] = []
    for k, segment in enumerate(problem.segments):
        for q, kind in enumerate(segment.kinds[1:], start=1):
            for v in range(problem.num_virtual):
                saved = problem.most_memory(segment.kinds[0], v) - problem.most_memory(kind, v)
                if saved > 0 and rows[k][0][v]:
                    choices.append((-saved / (kind.extra_backward + 1e-9), k, q, v))
    groups = {k: group for group in problem.groups for k in group}
    excess = _excess(problem, rows)
    for _, chosen, q, v in sorted(choices):
        stage = v % problem.num_stages
        # A stage recomputes the first layers of a stack, including those of earlier segments.
        for k in groups[chosen]:
            while k <= chosen and rows[k][0][v] and excess[stage] > 0:
                saved = max(
                    1,
                    problem.most_memory(problem.segments[k].kinds[0], v)
                    - problem.most_memory(problem.segments[k].kinds[q], v),
                )
                move = min(rows[k][0][v], -(-excess[stage] // saved))
                rows[k][0][v] -= move
                rows[k][q][v] += move
                excess = _excess(problem, rows)
    return _freeze(rows)


def _excess(problem: SplitProblem, rows: list[list[list[int]]]) -> list[int]:
    """Return peak memory minus the limit, by stage."""
    held = stage_memory(problem, _freeze(rows))
    return [size - limit for size, limit in zip(held, problem.memory_limit, strict=True)]


def _freeze(rows: list[list[list[int]]]) -> Placement:
    return tuple(tuple(tuple(row) for row in kinds) for kinds in rows)


def best_baseline(problem: SplitProblem) -> Baseline | None:
    """Return the fastest baseline that fits and is a valid plan, or ``None``."""
    plans = [item for item in baselines(problem) if item.fits and is_plan(problem, item.placement)]
    return min(plans, key=lambda item: item.step_time, default=None)


def is_plan(problem: SplitProblem, placement: Placement) -> bool:
    """Return whether a placement is valid: order of segments and kinds, blocks beside layers, joints, empty stages."""
    segments, num = problem.segments, problem.num_virtual
    here = [[sum(row[v] for row in kinds) for v in range(num)] for kinds in placement]
    for k, segment in enumerate(segments):
        first = next(v for v in range(num) if here[k][v])
        for before in segment.predecessors:
            if max(v for v in range(num) if here[before][v]) > first:
                return False
        if segment.beside is not None and any(here[k][v] > here[segment.beside][v] for v in range(num)):
            return False
        if segment.continues and any(
            sum(placement[k - 1][q][v] for q in segment.order[place:])
            and sum(placement[k][q][v] for q in segment.order[:place])
            for place in range(1, len(segment.kinds))
            for v in range(num)
        ):
            return False
    if problem.breaks_joint(numpy.cumsum(numpy.array(here).T, axis=0)).any():
        return False
    counted = [row for row, s in zip(here, segments, strict=True) if s.beside is None]
    return problem.allow_empty_stages or all(any(row[v] for row in counted) for v in range(num))
