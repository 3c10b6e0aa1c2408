"""Whole layers per rank: the largest number of a stack's layers that a rank can hold within a given step time.

Fractions of layers weaken the bound on ranks with few layers: 80 layers on 16 ranks, and an output layer that takes as
long as 1.4 of them, leave some rank with six, not 5.1. The linear program of one rank is small, and its optimum can be
rounded down; the linear relaxation of all ranks allows no such rounding.
"""

from __future__ import annotations

from math import floor
from typing import Any

from mindspeed_autoparallel.planner.split.bounds.least_recompute import LeastRecompute
from mindspeed_autoparallel.planner.split.model.cut_model import tail_rows
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.layer_row import is_one_row
from mindspeed_autoparallel.planner.split.model.linear import LinearProgram, memory_rows, path_row
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.settings import SETTINGS

ROUNDING = 1e-6


def rank_cuts(problem: SplitProblem) -> list[Cut]:
    """Return one path per rank, a cut for every placement: the forwards of the first microbatch on the ranks before it,
    all work of the rank without a pause, and the backwards of the last microbatch on the ranks before it."""
    num, size, microbatches = problem.num_virtual, problem.num_stages, problem.num_microbatches
    found: list[Cut] = []
    for rank in range(size):
        passes = [microbatches if v % size == rank else int(v < rank) for v in range(num)]
        constant = 2 * sum(problem.link[:rank]) + 2 * sum(passes) * problem.per_operation
        found.append(Cut(tuple(passes), tuple(passes), constant, rank if problem.tails else -1))
    return found


def rank_rooms(problem: SplitProblem, step: float) -> list[float]:
    """Return the most ticks of every rank's own work and tail in plans that take at most ``step``."""
    blocks = _sure_blocks(problem)
    return [
        step * (1 + ROUNDING) - cut.constant - _least_way(problem, rank, blocks)
        for rank, cut in enumerate(rank_cuts(problem))
    ]


def ranks_reach(problem: SplitProblem, step: float) -> bool:
    """Return whether the ranks together hold all layers within ``step`` ticks; if not, no such plan exists.

    Considers only the path and the memory of each rank by itself.
    """
    return _Ranks(problem).reach(step)


def whole_ranks_bound(problem: SplitProblem, low: float, high: float) -> float:
    """Return a lower bound of the step time between ``low`` and ``high``, by bisection."""
    ranks = _Ranks(problem)
    if not ranks.reach(high):
        return high
    for _ in range(SETTINGS.ranks_halvings):
        middle = (low + high) / 2
        if ranks.reach(middle):
            high = middle
        else:
            low = middle
    return low


class _Ranks:
    """Every rank of a pipeline by itself, solved for one step time after another."""

    def __init__(self, problem: SplitProblem) -> None:
        work = sum(s.num_layers * (s.forward + s.backward) for s in problem.segments) / problem.num_stages
        self._layers = {
            group: sum(problem.segments[k].num_layers for k in group)
            for group in problem.groups
            if min(problem.segments[k].forward + problem.segments[k].backward for k in group)
            > SETTINGS.ranks_worth_rounding * work
        }
        self._layers = {group: total for group, total in self._layers.items() if total > 1}
        cuts = rank_cuts(problem) if self._layers else []
        blocks = _sure_blocks(problem)
        self._ranks = [_Rank(problem, rank, cut, blocks) for rank, cut in enumerate(cuts)]

    def reach(self, step: float) -> bool:
        """Return whether the ranks together hold all layers of every stack within ``step``."""
        for group, total in self._layers.items():
            held = [rank.most(group, step, total) for rank in self._ranks]
            if None in held or sum(most for most in held if most is not None) < total:
                return False
        return True


def _sure_blocks(problem: SplitProblem) -> dict[int, int]:
    """Return the single blocks at the ends of a row with their virtual stage, which is the same in every plan."""
    if problem.allow_empty_stages or not is_one_row(problem):
        return {}
    ends = {0: 0, len(problem.segments) - 1: problem.num_virtual - 1}
    return {k: v for k, v in ends.items() if problem.segments[k].num_layers == len(problem.segments[k].kinds) == 1}


class _Rank:
    """One rank's part of the linear relaxation, and the recomputation of its whole layers."""

    def __init__(self, problem: SplitProblem, rank: int, cut: Cut, blocks: dict[int, int]) -> None:
        self.problem, self.rank, self._program = problem, rank, LinearProgram()
        # Scale times to about 1: solvers fail on large numbers.
        self._unit = max(1.0, sum(s.num_layers * (s.forward + s.backward) for s in problem.segments))
        self._unit *= problem.num_microbatches / problem.num_virtual
        self._chunks = range(rank, problem.num_virtual, problem.num_stages)
        self.x: list[list[dict[int, Any]]] = [
            [{v: self._program.number(segment.num_layers) for v in self._chunks} for _ in segment.kinds]
            for segment in problem.segments
        ]
        for k, place in blocks.items():
            for v, variable in self.x[k][0].items():
                variable.SetBounds(int(v == place), int(v == place))
        self._blocks = {k: v for k, v in blocks.items() if v in self._chunks}
        self._recomputes: dict[tuple[int, ...], LeastRecompute] = {}
        self._add_memory(rank)
        self._steps: list[Any] = []
        self._constants: list[int] = []
        self._constant = cut.constant + _least_way(problem, rank, blocks)
        self._add_path(cut)

    def _add_memory(self, rank: int) -> None:
        problem = self.problem
        scale = 1 / max(1, problem.memory_limit[rank])
        for row in memory_rows(problem, rank):
            terms = [(term.size * scale, self.x[term.segment][term.kind][term.stage]) for term in row]
            self._program.row(terms, high=problem.memory_limit[rank] * scale)

    def _add_path(self, cut: Cut) -> None:
        problem = self.problem
        for tail, fixed in tail_rows(problem, self.x, cut.tail_stage):
            # Keyed by id: the solver's variables overload ``==`` and cannot be keys.
            after = {id(variable): ticks for ticks, variable in tail}
            terms: list[tuple[float, Any]] = []
            for term in path_row(problem, cut, self._chunks):
                variable = self.x[term.segment][term.kind][term.stage]
                terms.append(((term.size + after.get(id(variable), 0)) / self._unit, variable))
            row = self._program.row(terms, high=0)
            self._steps.append(row)
            self._constants.append(self._constant + fixed)

    def most(self, group: tuple[int, ...], step: float, total: int) -> int | None:
        """Return the most whole layers of a stack on the rank; ``None`` if not even the layers and blocks that it holds
        in every plan fit."""
        most = self._most_relaxed(group, step, total)
        if most is None:
            return None
        if group not in self._recomputes:
            self._recomputes[group] = LeastRecompute(self.problem, self.rank, group, self._blocks)
        recompute = self._recomputes[group]
        if not recompute.suits(most):
            return most
        while most >= recompute.fewest and not self._is_within(recompute, group[0], most, step):
            most -= 1
        return most if most >= recompute.fewest else None

    def _is_within(self, recompute: LeastRecompute, k: int, layers: int, step: float) -> bool:
        """Return whether ``layers`` whole layers of segment ``k`` and the fixed blocks take at most ``step``."""
        problem, added = self.problem, recompute.added(layers)
        if added is None:
            return False
        held = {**dict.fromkeys(self._blocks, 1), k: layers}
        work = added + sum(n * (problem.segments[j].forward + problem.segments[j].backward) for j, n in held.items())
        after = 0
        for row in problem.tails_at(self.rank):
            # With ticks of 0 or more, other layers on the rank do not shorten the tail.
            if min(row.by_segment) >= 0 and any(n and row.by_segment[j] for j, n in held.items()):
                after = max(after, row.fixed + sum(row.by_segment[j] * n for j, n in held.items()))
        return self._constant + problem.num_microbatches * work + after <= step * (1 + ROUNDING)

    def _most_relaxed(self, group: tuple[int, ...], step: float, total: int) -> int | None:
        """Return the most layers on the rank if fractions of them may recompute."""
        for row, constant in zip(self._steps, self._constants, strict=True):
            row.SetUb((step * (1 + ROUNDING) - constant) / self._unit)
        objective = self._program.solver.Objective()
        objective.Clear()
        for k in group:
            for variables in self.x[k]:
                for variable in variables.values():
                    objective.SetCoefficient(variable, 1)
        objective.SetMaximization()
        status = self._program.run()
        if status == "infeasible":
            return None
        return min(total, floor(objective.Value() + ROUNDING)) if status == "optimal" else total


def _least_way(problem: SplitProblem, rank: int, blocks: dict[int, int]) -> int:
    """Return the least time of one microbatch's forward and backward on the stages before a rank, in ticks."""
    if problem.allow_empty_stages:
        return 0
    solid = [k for k, s in enumerate(problem.segments) if s.beside is None]
    way = 0
    for v in range(rank):
        # Fixed blocks are on their own stage only.
        times = [_least_time(problem, k) for k in solid if blocks.get(k, v) == v]
        beside = [_least_time(problem, k) for k, place in blocks.items() if place == v and k not in solid]
        way += min(times) + sum(beside)
    return way


def _least_time(problem: SplitProblem, k: int) -> int:
    segment = problem.segments[k]
    return segment.forward + segment.backward + min(kind.extra_backward for kind in segment.kinds)
