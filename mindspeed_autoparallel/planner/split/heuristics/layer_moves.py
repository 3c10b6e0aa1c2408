"""Local search over layer counts: a move between two stages transfers a layer, or exchanges layers of two segments.

The search bounds all moves by the known cuts and replays the promising ones together.
"""

from __future__ import annotations

import random
import time

import numpy

from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array, RecomputeChoice
from mindspeed_autoparallel.planner.split.model.solution import batch_simulator, held_times
from mindspeed_autoparallel.planner.split.settings import SETTINGS

IMPOSSIBLE = 2.0**50


class LayerMoves:
    """Local search that keeps the best plan found; layer counts are ``[stage, segment]``."""

    def __init__(self, problem: SplitProblem, choice: RecomputeChoice, cuts: dict[Cut, None], seed: int) -> None:
        """List all moves. Replays add their cuts to ``cuts``."""
        self.problem, self.choice, self.cuts = problem, choice, cuts
        self._passes: Array = numpy.zeros(0)
        self._constant: Array = numpy.zeros(0)
        self.simulator = batch_simulator(problem)
        self.best: Array | None = None
        self.best_time, self.replays = numpy.inf, 0
        self._drawn = random.Random(seed)
        self._known: dict[tuple[int, tuple[int, ...]], tuple[float, float, float]] = {}
        self._shifts = self._all_shifts()
        num = problem.num_stages
        pairs = [(a, b) for a in range(num) for b in range(num) if a != b]
        self._from: Array = numpy.repeat([a for a, _ in pairs], len(self._shifts)).astype(int)
        self._to: Array = numpy.repeat([b for _, b in pairs], len(self._shifts)).astype(int)
        self._by: Array = numpy.tile(numpy.arange(len(self._shifts)), len(pairs))

    def __len__(self) -> int:
        """Return the number of moves."""
        return len(self._by)

    def _all_shifts(self) -> Array:
        """Return the layers that a move transfers from one stage to the other: ``[shift, segment]``."""
        segments = self.problem.segments
        one: Array = numpy.eye(len(segments), dtype=numpy.int64)
        rows = [*one]
        rows += [one[j] - one[k] for k in range(len(segments)) for j in range(k)]
        rows += [one[k] + one[s.beside] for k, s in enumerate(segments) if s.beside is not None]
        return numpy.array(rows)

    def add(self, starts: list[Array], deadline: float, most: int = 3) -> None:
        """Descend from the ``most`` fastest of ``starts``."""
        if not starts:
            return
        steps = self._steps(numpy.array(starts))
        for index in numpy.argsort(steps, kind="stable")[:most]:
            if numpy.isfinite(steps[index]):
                self._descend(starts[int(index)], float(steps[index]), deadline)

    def perturb(self, most_replays: int, deadline: float) -> None:
        """Descend from perturbed plans until ``most_replays`` replays in a row find no faster plan."""
        if self.best is None:
            return
        here, now = self.best, self.best_time
        until = self.replays + most_replays
        for _ in range(most_replays):
            if self.replays >= until or time.monotonic() > deadline:
                return
            counts = self._kicked(here)
            step = float(self._steps(counts[None])[0])
            if not numpy.isfinite(step):
                continue
            before = self.best_time
            found, value = self._descend(counts, step, deadline)
            if value <= now * (1 + 1e-4):
                here, now = found, value
            if self.best_time < before:
                until = self.replays + most_replays

    def _kicked(self, counts: Array) -> Array:
        for _ in range(self._drawn.choice(SETTINGS.layer_moves_kicks)):
            index = self._drawn.randrange(len(self._by))
            shift = self._shifts[self._by[index]] * self._drawn.choice((1, -1))
            moved = counts.copy()
            moved[self._from[index]] -= shift
            moved[self._to[index]] += shift
            if (moved >= 0).all():
                counts = moved
        return counts

    def _descend(self, counts: Array, step: float, deadline: float) -> tuple[Array, float]:
        failed = 0
        while True:
            if step < self.best_time:
                self.best, self.best_time = counts, step
            moves = self._promising(counts, step) if time.monotonic() < deadline else self._by[:0]
            if not len(moves):
                return counts, step
            moved = numpy.tile(counts, (len(moves), 1, 1))
            rows, shifts = numpy.arange(len(moves)), self._shifts[self._by[moves]]
            moved[rows, self._from[moves]] -= shifts
            moved[rows, self._to[moves]] += shifts
            values = self._steps(moved)
            best = int(values.argmin())
            if values[best] < step:
                counts, step, failed = moved[best], float(values[best]), 0
                continue
            failed += 1
            if failed == SETTINGS.layer_moves_most_failed:
                return counts, step

    def _promising(self, counts: Array, step: float) -> Array:
        """Return the moves with the lowest bounds, all below ``step``, under the known cuts."""
        num = self.problem.num_stages
        here, less, more = (
            numpy.array([[self._times(v, row) for row in counts[v] + sign * shifts] for v in range(num)])
            for sign, shifts in ((1, numpy.zeros_like(self._shifts[:1])), (-1, self._shifts), (1, self._shifts))
        )
        weights, constant = self._weights()
        # [stage, shift, cut]
        here, taken, given = (numpy.einsum("vst,vtc->vsc", times, weights) for times in (here, less, more))
        value = constant + here.sum(axis=(0, 1))
        bound = (value + (taken - here)[self._from, self._by] + (given - here)[self._to, self._by]).max(axis=1)
        found = numpy.flatnonzero(bound < step)
        return found[numpy.argsort(bound[found], kind="stable")[: SETTINGS.layer_moves_replayed]]

    def _weights(self) -> tuple[Array, Array]:
        """Return each cut's passes of every stage, ``[stage, (forward, backward, tail), cut]``, and the constants."""
        if len(self.cuts) != len(self._constant):
            last = numpy.array([cut.tail_stage for cut in self.cuts]) == numpy.arange(self.problem.num_stages)[:, None]
            passes = [numpy.array([cut[way] for cut in self.cuts], dtype=float).T for way in (0, 1)]
            self._passes = numpy.stack([*passes, last.astype(float)], axis=1)
            self._constant = numpy.array([float(cut.constant) for cut in self.cuts])
        return self._passes, self._constant

    def _times(self, stage: int, counts: Array) -> tuple[float, float, float]:
        """Return forward, backward and tail times; forward is ``IMPOSSIBLE`` if the stage cannot hold ``counts``."""
        held = tuple(counts.tolist())
        found = self._known.get((stage, held))
        if found is None:
            found = self._known[stage, held] = self._looked_up(stage, held)
        return found

    def _looked_up(self, stage: int, held: tuple[int, ...]) -> tuple[float, float, float]:
        found = held_times(self.choice, stage, held) if min(held) >= 0 else None
        return (IMPOSSIBLE, IMPOSSIBLE, 0.0) if found is None else (float(found[0]), float(found[1]), float(found[2]))

    def _steps(self, counts: Array) -> Array:
        times = numpy.array([[self._times(v, row) for v, row in enumerate(rows)] for rows in counts])
        steps = numpy.full(len(counts), numpy.inf)
        possible = (times[:, :, 0] < IMPOSSIBLE).all(axis=1) & self.in_order(counts)
        steps[possible] = self._replayed(times[possible])
        return steps

    def _replayed(self, times: Array) -> Array:
        """Return step times; the critical path of the fastest becomes a cut, unless one replay cannot hold them all."""
        if not len(times):
            return numpy.zeros(0)
        self.replays += len(times)
        forward, backward, tails = times[:, :, 0], times[:, :, 1], times[:, :, 2]
        at_once = self.simulator.at_once
        if len(times) > at_once:
            return self.simulator.step_times(forward, backward) + tails.max(axis=1)
        ends, path_of = self.simulator.replay(forward, backward)
        steps: Array = ends + tails.max(axis=1)
        best = int(steps.argmin())
        path = path_of(best)
        last = int(tails[best].argmax()) if self.problem.tails else -1
        self.cuts[Cut.of(path, forward[best], backward[best], ends[best], last)] = None
        return steps

    def in_order(self, counts: Array) -> Array:
        """Return which counts, ``[candidate, stage, segment]``, keep the order of segments and the joints."""
        last = counts.shape[1] - 1
        some = counts > 0
        begin, end = some.argmax(axis=1), last - some[:, ::-1].argmax(axis=1)
        kept: Array = ~self.problem.breaks_joint(numpy.cumsum(counts, axis=1)).any(axis=1)
        for k, segment in enumerate(self.problem.segments):
            for before in segment.predecessors:
                kept &= end[:, before] <= begin[:, k]
        return kept
