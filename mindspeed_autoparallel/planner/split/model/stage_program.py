"""The linear relaxation of a row of layers within a step, in few terms per path: times of stages are variables.

It is asked for the least or the most of one number after another, each time from where the last answer was (GLOP).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy

from mindspeed_autoparallel.planner.split.model.cut_model import ROUNDING, RankCap
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.layer_ranges import LayerRanges, Number
from mindspeed_autoparallel.planner.split.model.linear import LinearProgram, memory_rows
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.settings import SETTINGS


class StageProgram:
    """Layers by segment, recomputed ones by kind, and times, of every virtual stage; without transients and tails."""

    def __init__(self, problem: SplitProblem, step: float) -> None:
        self.problem, program = problem, LinearProgram()
        self._solver, self._number, self._row, self._run = program.solver, program.number, program.row, program.run
        self._solver.SetSolverSpecificParametersAsString(
            f"max_number_of_iterations: {SETTINGS.tightening_most_iterations}"
        )
        self._solver.SetTimeLimit(SETTINGS.tightening_most_ms)
        self.cuts: set[Cut] = set()
        num, segments = problem.num_virtual, problem.segments
        self.unit = max(1.0, sum(s.num_layers * (s.forward + s.backward) for s in segments) / num)
        self._solid = [k for k, s in enumerate(segments) if s.beside is None]
        total = sum(segments[k].num_layers for k in self._solid)
        self._step = step
        self._numbers: dict[Number, Any] = {
            **{("boundary", v): self._number(total) for v in range(1, num)},
            **{("stage", v): self._number(total) for v in range(num)},
            **{("rank", rank): self._number(total) for rank in range(problem.num_stages)},
        }
        self._held = [[self._number(s.num_layers) for _ in range(num)] for s in segments]
        self._before = [[self._number(s.num_layers) for _ in range(num - 1)] for s in segments]
        self._recomputed = [[[self._number(s.num_layers) for _ in range(num)] for _ in s.kinds[1:]] for s in segments]
        self._times = [[self._number() for _ in range(num)] for _ in range(2)]
        for v in range(num):
            self._add_stage(v, total)
        for boundary in range(1, num):
            self._add_order(boundary)
        for rank in range(problem.num_stages):
            stages = range(rank, num, problem.num_stages)
            self._row([*((1.0, self._numbers["stage", v]) for v in stages), (-1.0, self._numbers["rank", rank])], 0, 0)
            self._add_memory(rank)

    def _add_stage(self, v: int, total: int) -> None:
        segments, stage = self.problem.segments, self._numbers["stage", v]
        self._row([*((1.0, self._held[k][v]) for k in self._solid), (-1.0, stage)], 0, 0)
        self._advance(stage, [self._numbers.get(("boundary", u)) for u in (v, v + 1)], total)
        for k, segment in enumerate(segments):
            before = [self._before[k][u - 1] if 0 < u < self.problem.num_virtual else None for u in (v, v + 1)]
            self._advance(self._held[k][v], before, segment.num_layers)
            self._row([*((1.0, row[v]) for row in self._recomputed[k]), (-1.0, self._held[k][v])], high=0)
        forward, backward = (times[v] for times in self._times)
        terms = [(s.forward / self.unit, held[v]) for s, held in zip(segments, self._held, strict=True)]
        self._row([*terms, (-1.0, forward)], 0, 0)
        plain = [s.backward + s.kinds[0].extra_backward for s in segments]
        terms = [(ticks / self.unit, held[v]) for ticks, held in zip(plain, self._held, strict=True)]
        terms += [
            ((kind.extra_backward - s.kinds[0].extra_backward) / self.unit, row[v])
            for s, rows in zip(segments, self._recomputed, strict=True)
            for kind, row in zip(s.kinds[1:], rows, strict=True)
        ]
        self._row([*terms, (-1.0, backward)], 0, 0)

    def _advance(self, held: Any, around: list[Any], total: int) -> None:
        """Add that what is placed after a stage is what was placed before it and what the stage holds."""
        terms, constant = [(1.0, held)], 0
        before, after = around
        if before is not None:
            terms.append((1.0, before))
        if after is not None:
            terms.append((-1.0, after))
        else:
            constant = total
        self._row(terms, constant, constant)

    def _add_order(self, boundary: int) -> None:
        segments, before = self.problem.segments, [row[boundary - 1] for row in self._before]
        self._row([*((1.0, before[k]) for k in self._solid), (-1.0, self._numbers["boundary", boundary])], 0, 0)
        for earlier, later in itertools.pairwise(self._solid):
            shares = 1 / segments[later].num_layers, 1 / segments[earlier].num_layers
            self._row([(shares[0], before[later]), (-shares[1], before[earlier])], high=0)
        for k, segment in enumerate(segments):
            if segment.beside is None:
                continue
            # With the first layer of its segment, or with the last.
            layers = segments[segment.beside].num_layers
            at_begin, its = k < segment.beside, before[segment.beside]
            self._row([(1.0, before[k]), (-1.0 if at_begin else -1 / layers, its)], high=0)
            low = 0 if at_begin else 1 - layers
            self._row([(1.0, before[k]), (-1 / layers if at_begin else -1.0, its)], low=low)

    def _add_memory(self, rank: int) -> None:
        problem = self.problem
        scale = 1 / max(1, problem.memory_limit[rank])
        for row in memory_rows(problem, rank):
            sizes = {term[1:]: term.size for term in row}
            terms = []
            for (k, q, v), size in sizes.items():
                if q:
                    terms.append(((size - sizes[k, 0, v]) * scale, self._recomputed[k][q - 1][v]))
                else:
                    terms.append((size * scale, self._held[k][v]))
            self._row(terms, high=problem.room(rank) * scale)

    def add(self, cut: Cut) -> None:
        """Add that a path takes no longer than the step."""
        self.cuts.add(cut)
        passes = zip(self._times, cut[:2], strict=True)
        terms = [(float(n), t) for times, counts in passes for n, t in zip(counts, times, strict=True) if n]
        self._row(terms, high=(self._step - cut.constant) / self.unit)

    def cap(self, caps: Iterable[RankCap]) -> None:
        """Add what ranks hold at most, and recompute at least."""
        segments = self.problem.segments
        for item in caps:
            stages = range(item.rank, self.problem.num_virtual, self.problem.num_stages)
            self._row([(1.0, self._held[k][v]) for k in item.group for v in stages], high=item.most)
            for slope, fixed in item.floors:
                terms = []
                for k in item.group:
                    plain, *others = (kind.extra_backward for kind in segments[k].kinds)
                    terms += [((plain - slope) / self.unit, self._held[k][v]) for v in stages]
                    for more, row in zip(others, self._recomputed[k], strict=True):
                        terms += [((more - plain) / self.unit, row[v]) for v in stages]
                self._row(terms, low=(fixed - ROUNDING * abs(fixed)) / self.unit)

    def keep_to(self, ranges: LayerRanges) -> None:
        """Take over what is known of boundaries, stages and ranks, and so of segments' layers before a boundary."""
        for number, variable in self._numbers.items():
            low, high = ranges.of(number)
            variable.SetBounds(float(low), float(high))
        for variables, places in zip(self._before, ranges.before(self.problem), strict=True):
            for variable, (low, high) in zip(variables, places, strict=True):
                variable.SetBounds(float(low), float(high))

    def follow_order(self, ranges: LayerRanges) -> None:
        """Add that segments come one after the other, as sharply as the ranges of boundaries allow."""
        begun = 0
        for index, k in enumerate(self._solid[:-1]):
            begun += self.problem.segments[k].num_layers
            for place, (low, high) in enumerate(ranges.boundaries[1:-1]):
                if low < begun < high:
                    slope = (begun - low) / (high - low)
                    terms = [(1.0, self._before[j][place]) for j in self._solid[: index + 1]]
                    self._row([*terms, (-slope, self._numbers["boundary", place + 1])], low=low - slope * low)

    def any_point(self) -> str:
        """Look for any placement: ``optimal`` (there is one), ``infeasible`` or ``unknown``."""
        self._solver.Objective().Clear()
        return self._run()

    def farthest(self, number: Number, sign: int) -> tuple[str, float]:
        """Return ``optimal``, ``infeasible`` or ``unknown``, and the most (``sign`` 1) or least (-1) of a number."""
        return self._solve(self._numbers[number], sign)

    def _solve(self, variable: Any, sign: int) -> tuple[str, float]:
        objective = self._solver.Objective()
        objective.Clear()
        objective.SetCoefficient(variable, 1.0)
        objective.SetOptimizationDirection(sign > 0)
        status = self._run()
        return status, variable.solution_value() if status == "optimal" else 0.0

    def at_their_bounds(self, ranges: LayerRanges) -> list[tuple[Number, int]]:
        """Return the bounds that the last answer attains but for less than a layer: these cannot be tightened."""
        found: list[tuple[Number, int]] = []
        for number, variable in self._numbers.items():
            (low, high), value = ranges.of(number), variable.solution_value()
            if value > high - 1 + SETTINGS.tightening_at_bound:
                found.append((number, 1))
            if value < low + 1 - SETTINGS.tightening_at_bound:
                found.append((number, -1))
        return found

    def times(self) -> tuple[Array, Array]:
        """Return forward and backward times of the last answer, in ticks."""
        forward, backward = (
            numpy.array([max(0.0, t.solution_value()) for t in times]) * self.unit for times in self._times
        )
        return forward, backward
