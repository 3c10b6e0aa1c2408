"""Good placements by steps: boundaries move, recomputation moves, and what is found is shaken and improved again.

A step shifts boundaries i to j by one layer, all of them tried at once: cuts known so far discard most, the batch
simulator times the rest, and each round's critical paths become cuts. Effort is counted in replays, not in seconds,
so that a rerun finds the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.planner.split.candidates import Candidates, Evaluator
from mindspeed_autoparallel.planner.split.recompute_choice import Array

LIGHTER_ENDS = (0.0, 0.1, 0.2, 0.3, 0.5)
"""First placements: by how much less the last chunk holds; the first one half of that."""
FIRST_BATCH, MOST_IN_BATCH = 16, 512
"""Candidates timed together; doubled while none is better."""
MOST_KICKS = 6
"""Moves at once when a placement is shaken."""
FORGIVEN = 5e-4
"""How much slower than the current one a placement may be to go on from."""
RESTART = 30
"""Shakes after which the best one is taken up again."""
PATIENCE, MORE_PATIENCE = 90, 1.5
"""Shakes without success before it ends; and of the shakes made until the last success."""
OTHER_PLACES = 0.05
"""Weight of recomputation where the critical path does not pass, in passes per microbatch."""


@dataclass
class Best:
    """The best placement known."""

    one: Candidates
    step: int


class LocalSearch:
    """Deterministic by seed and effort."""

    def __init__(self, evaluator: Evaluator, deadline: float, seed: int = 0) -> None:
        self.evaluator, self.deadline = evaluator, deadline
        self._random = numpy.random.default_rng(seed)
        self._moves = _shifts(evaluator.problem.num_virtual)
        self.best: Best | None = None
        self.shakes = 0

    @property
    def is_late(self) -> bool:
        """Return whether time is up."""
        return time.monotonic() > self.deadline

    def start(self) -> bool:
        """Search downwards from a few simple placements. Return whether any that fits was found."""
        row, problem = self.evaluator.row, self.evaluator.problem
        work = (row.forward + row.backward).astype(float) + 1e-3 * numpy.arange(row.num_layers + 1)
        for lighter in LIGHTER_ENDS:
            share = numpy.ones(problem.num_virtual)
            if problem.num_chunks > 1:
                share[-problem.num_stages :] *= 1 - lighter
                share[: problem.num_stages] *= 1 - lighter / 2
            elif lighter:
                break
            self.add(row.even(work, share))
            if self.best is not None and self.is_late:
                break
        if self.best is None:
            self.add(row.even(numpy.arange(row.num_layers + 1), numpy.ones(problem.num_virtual)))
        return self.best is not None

    def add(self, ends: Array) -> None:
        """Search downwards from a placement, made to fit first where it does not."""
        found = self._made_to_fit(ends)
        if found is not None:
            self.keep(*self._descend(found))

    def keep(self, one: Candidates, step: int) -> None:
        """Take note of a placement found elsewhere."""
        if self.best is None or step < self.best.step:
            self.best = Best(one, step)

    def shake(self, most_simulated: int, lower_bound: float = 0) -> None:
        """Search on from shaken placements until effort or patience ends, or the best one is proved."""
        assert self.best is not None
        current, since, quiet = self.best, 0, 0
        while self.best.step > lower_bound and self.evaluator.num_simulated < most_simulated and not self.is_late:
            if quiet > PATIENCE + MORE_PATIENCE * (self.shakes - quiet):
                break
            self.shakes, since, quiet = self.shakes + 1, since + 1, quiet + 1
            found = self._shaken(current.one)
            if found is None:
                continue
            before = self.best.step
            one, step = self._descend(found)
            self.keep(one, step)
            if step <= current.step * (1 + FORGIVEN):
                current = Best(one, step)
            if self.best.step < before:
                current, since, quiet = self.best, 0, 0
            if since >= RESTART:
                current, since = self.best, 0

    def _weights(self, one: Candidates | None) -> Array:
        problem = self.evaluator.problem
        weights = numpy.full(problem.num_virtual, OTHER_PLACES * problem.num_microbatches)
        if one is None:
            return weights
        _, (path,) = self.evaluator.simulator.critical_paths(one.forward, one.backward)
        return weights + numpy.array(path.num_backwards)

    def _made_to_fit(self, ends: Array) -> Candidates | None:
        """Return the placement, or one that fits, found by moves that lower the overrun."""
        evaluator = self.evaluator
        weights = self._weights(None)
        over = int(evaluator.overrun(ends[None])[0])
        while not self.is_late:
            if not over:
                found = evaluator.candidates(ends[None], weights)
                if len(found):
                    return found
            around = self._around(ends)
            if not len(around):
                return None
            if not over:
                fitting = evaluator.candidates(around, weights)
                return fitting.take(numpy.arange(1)) if len(fitting) else None
            overs = evaluator.overrun(around)
            if int(overs.min()) >= over:
                return None
            ends, over = around[int(overs.argmin())], int(overs.min())
        return None

    def _around(self, ends: Array) -> Array:
        moved = ends + self._moves
        return moved[self.evaluator.row.is_cut(moved)]

    def _shaken(self, one: Candidates) -> Candidates | None:
        ends = one.ends[0]
        for _ in range(int(self._random.integers(2, MOST_KICKS + 1))):
            around = self._around(ends)
            if len(around):
                ends = around[int(self._random.integers(len(around)))]
        found = self.evaluator.candidates(ends[None], self._weights(one))
        return found if len(found) else self._made_to_fit(ends)

    def _descend(self, one: Candidates) -> tuple[Candidates, int]:
        """Return the placement that no single move makes faster."""
        evaluator = self.evaluator
        step = int(evaluator.learn(one)[0])
        while not self.is_late:
            around = [evaluator.candidates(self._around(one.ends[0]), self._weights(one))]
            if one.extra.any():
                around.append(evaluator.variants(one))
            found = self._faster(Candidates.join(around), step)
            if found is None:
                break
            one = found
            step = int(evaluator.learn(one)[0])
        return one, step

    def _faster(self, around: Candidates, step: int) -> Candidates | None:
        """Return one of the candidates that is faster: of the first batch that has any, the fastest."""
        evaluator = self.evaluator
        bounds = evaluator.bounds(around)
        left = numpy.flatnonzero(bounds < step)
        left = left[numpy.argsort(bounds[left], kind="stable")]
        size = FIRST_BATCH
        while len(left) and not self.is_late:
            batch = around.take(left[:size])
            steps = evaluator.steps(batch)
            if steps.min() < step:
                return batch.take(numpy.array([int(steps.argmin())]))
            evaluator.learn(batch.take(numpy.arange(1)))
            left, size = left[size:], min(MOST_IN_BATCH, 2 * size)
            left = left[evaluator.bounds(around.take(left)) < step]
        return None


def _shifts(num_virtual: int) -> Array:
    """Return every way to shift boundaries i to j by one, ``[move, num_virtual + 1]``."""
    i, j = numpy.triu_indices(num_virtual - 1)
    places = numpy.arange(num_virtual + 1)
    shift = ((places > i[:, None]) & (places <= j[:, None] + 1)).astype(numpy.int64)
    return numpy.concatenate([shift, -shift])
