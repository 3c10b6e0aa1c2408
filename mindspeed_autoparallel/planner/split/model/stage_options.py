"""Options of the stages for parallel branches: every combination of layer counts that a stage may hold, with its times.

Of all recompute choices of a stage's layers only the one with the least added backward time matters, since every
schedule is monotone in stage times. That time is computed on demand; until then a lower bound takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.ranges import NEVER
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array, RecomputeChoice
from mindspeed_autoparallel.planner.split.model.solution import Placement, placement_that_holds, tail_lengths
from mindspeed_autoparallel.planner.split.settings import SETTINGS


class StageOptions:
    """The options, one row each, and their times on every stage."""

    def __init__(self, problem: SplitProblem, longest: int) -> None:
        """List the combinations with which a stage computes for at most ``longest`` ticks of a step."""
        self.problem, self.longest = problem, longest
        self.choice = RecomputeChoice(problem)
        self.counts: Array = numpy.zeros((0, len(problem.segments)), dtype=numpy.int64)
        """``[option, segment]``."""
        listed = self._listed()
        self.is_complete = listed is not None
        """Whether all options are listed; none are if there are too many (``SETTINGS.options_most_options``)."""
        if listed is not None:
            self.counts = listed
        self.forward: Array = self.counts @ numpy.array([s.forward for s in problem.segments])
        self._plain: Array = self.counts @ numpy.array([s.backward for s in problem.segments])
        self.tail: list[Array] = [
            tail_lengths(problem.tails_at(stage), self.counts) for stage in range(problem.num_stages)
        ]
        """Tail times by stage."""
        self.backward: list[Array] = []
        """Backward times by stage: exact, or a lower bound."""
        self._exact: list[Array] = []
        self.first: list[Array] = []
        """Indices of options that may fit, by stage."""
        alike: dict[tuple[int, ...], int] = {}
        for stage in range(problem.num_stages):
            memory = [kind.memory[stage] for s in problem.segments for kind in s.kinds]
            other = alike.setdefault((problem.memory_limit[stage], *memory), stage)
            if other < stage:
                # Stages with the same memory share their arrays, and so all results of ``settle``.
                self.backward.append(self.backward[other])
                self._exact.append(self._exact[other])
                self.first.append(self.first[other])
                continue
            extra, may_fit, exact = self._least_extra(stage)
            self.backward.append(self._plain + extra)
            self._exact.append(exact)
            self.first.append(numpy.flatnonzero(may_fit))

    def _listed(self) -> Array | None:
        problem = self.problem
        segments = problem.segments
        most = self.longest // problem.num_microbatches - 2 * problem.per_operation
        counts: Array = numpy.zeros((1, 0), dtype=numpy.int64)
        busy: Array = numpy.zeros(1, dtype=numpy.int64)
        order = sorted(range(len(segments)), key=lambda k: segments[k].num_layers)
        for k in order:
            sizes = numpy.arange(segments[k].num_layers + 1)
            with_these = busy[:, None] + sizes * (segments[k].forward + segments[k].backward)
            rows, number = numpy.nonzero(with_these <= most)
            if len(rows) > 4 * SETTINGS.options_most_options:
                return None
            counts, busy = numpy.concatenate([counts[rows], number[:, None]], axis=1), with_these[rows, number]
        counts = counts[:, numpy.argsort(order)]
        kept: Array = numpy.ones(len(counts), dtype=bool)
        if not problem.allow_empty_stages:
            kept &= counts[:, [k for k, s in enumerate(segments) if s.beside is None]].any(axis=1)
        for k, segment in enumerate(segments):
            if segment.beside is not None:
                kept &= counts[:, k] <= counts[:, segment.beside]
        return counts[kept] if kept.sum() <= SETTINGS.options_most_options else None

    def _least_extra(self, stage: int) -> tuple[Array, Array, Array]:
        """Return a lower bound of the added backward time (fractions of layers, no transients), which options may fit,
        and for which the bound is exact because nothing is recomputed."""
        segments = self.problem.segments
        plain = self.counts @ numpy.array([s.kinds[0].memory[stage] for s in segments])
        transient = numpy.where(self.counts > 0, [s.kinds[0].transient for s in segments], 0).max(axis=1, initial=0)
        missing = plain - self.problem.memory_limit[stage]
        exact = missing + transient <= 0
        if any(s.kinds[0].extra_backward for s in segments):
            return numpy.zeros_like(plain), numpy.ones(len(plain), dtype=bool), numpy.zeros(len(plain), dtype=bool)
        steps: list[tuple[float, int, int]] = []
        for k, segment in enumerate(segments):
            # The lower hull of the kinds: each further step costs more time per saved byte.
            memory, extra = segment.kinds[0].memory[stage], 0
            while True:
                leaner = [
                    ((kind.extra_backward - extra) / (memory - kind.memory[stage]), kind.memory[stage])
                    for kind in segment.kinds
                    if kind.memory[stage] < memory
                ]
                if not leaner:
                    break
                price, size = min(leaner)
                steps.append((price, k, memory - size))
                extra += round(price * (memory - size))
                memory = size
        added: Array = numpy.zeros(len(plain))
        left = numpy.maximum(missing, 0).astype(float)
        for price, k, saved in sorted(steps):
            here = numpy.minimum(left, self.counts[:, k] * saved)
            added += max(0.0, price) * here
            left -= here
        return numpy.floor(added * (1 - 1e-9)).astype(numpy.int64), left <= 0, exact

    def is_exact(self, stage: int, options: Array) -> Array:
        return self._exact[stage][options]

    def settle(self, stage: int, option: int) -> None:
        """Compute an option's exact backward time with the least recomputation; ``NEVER`` if it does not fit."""
        found = self.choice.best(stage, tuple(self.counts[option].tolist()))
        self.backward[stage][option] = NEVER if found is None else self._plain[option] + found[0]
        self._exact[stage][option] = True

    def near(self, stage: int, options: Array, counts: Sequence[float], number: int) -> list[int]:
        """Return the ``number`` options nearest to ``counts`` that fit, or fewer."""
        weight = numpy.array([s.forward + s.backward + 1 for s in self.problem.segments])
        far = numpy.abs(self.counts[options] - numpy.array(counts)) @ weight
        found: list[int] = []
        for place in numpy.argsort(far, kind="stable"):
            option = int(options[place])
            if not self._exact[stage][option]:
                self.settle(stage, option)
            if self.backward[stage][option] < NEVER:
                found.append(option)
                if len(found) == number:
                    break
        return found

    def placement(self, held: Array) -> Placement:
        """Return the placement of the layers ``held[stage, segment]``, which must fit."""
        return placement_that_holds(self.choice, held)
