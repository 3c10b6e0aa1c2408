"""Local search of placements: it moves boundaries and recomputation, and perturbs the results.

A move shifts boundaries i to j by one layer. Each round considers all moves at once: the known cuts discard most, the
batch simulator times the rest, and the critical paths become cuts. Several descents run side by side and share each
replay, since replaying a hundred placements takes little longer than replaying one. Effort is counted in replayed
placements, not in seconds, so that a rerun gives the same result.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from math import inf

import numpy

from mindspeed_autoparallel.planner.split.heuristics.candidates import Candidates, Evaluator, Replay, Request
from mindspeed_autoparallel.planner.split.model.layer_row import LayerRow, shifts
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.settings import SETTINGS


@dataclass(frozen=True)
class Best:
    """A placement with its step time and critical path."""

    one: Candidates
    step: int
    passes: Array
    """Backwards on its critical path, by virtual stage."""


Descent = Generator[Request, Replay, Best]
"""One descent: yields placements to replay, and returns the placement that no single move makes faster."""


class LocalSearch:
    """The search of one problem: deterministic for a seed and an effort."""

    def __init__(self, evaluator: Evaluator, deadline: float, seed: int = 0, no_later: float = 0.0) -> None:
        """List the moves. ``no_later``: without a placement that fits, the search for one goes on after ``deadline``
        until then."""
        self.evaluator, self.deadline, self.no_later = evaluator, deadline, max(deadline, no_later)
        self._random = numpy.random.default_rng(seed)
        self.moves = shifts(evaluator.problem.num_virtual)
        """``[move, num_virtual + 1]``: shifts of boundaries i to j, by 1 in the first half and by -1 in the other."""
        self._nowhere: Array = numpy.zeros(evaluator.problem.num_virtual, dtype=numpy.int64)
        self.best: Best | None = None
        self.perturbed = 0
        """Placements perturbed so far."""

    @property
    def is_late(self) -> bool:
        """Return whether time is up."""
        return time.monotonic() > self.deadline

    def start(self, hopeless: float = inf) -> bool:
        """Descend from the best simple splits. Return whether a placement that fits was found.

        The simple splits are timed even after the deadline, so that no result is worse than a hand-written split.
        ``hopeless``: the search ends with the fastest simple split if its step time exceeds this.
        """
        splits, evaluator = simple_splits(self.evaluator.row), self.evaluator
        fitting = evaluator.candidates(splits, self._weights(self._nowhere))
        fastest: list[Candidates] = []
        if len(fitting):
            order = numpy.argsort(evaluator.steps(fitting), kind="stable")[: SETTINGS.search_most_fastest]
            fastest = [fitting.take(order[place : place + 1]) for place in range(len(order))]
            (replay,) = evaluator.replay([Request(fastest[0], inf)])
            self.keep(Best(fastest[0], replay.step, replay.passes))
            if replay.step > hopeless:
                return True
        found = [self._made_to_fit(ends) for ends in splits[: len(SETTINGS.starts_lighter_ends)]]
        if self.best is None and not any(found):
            # Smallest overrun first: a split that is even in time may be far from fitting.
            nearest = numpy.argsort(evaluator.overrun(splits), kind="stable")
            found = [next(filter(None, (self._made_to_fit(splits[place]) for place in nearest)), None)]
        self._search_from([one for one in found if one is not None] + fastest)
        return self.best is not None

    def add(self, starts: list[Array]) -> None:
        """Descend from placements; those that do not fit are made to fit first."""
        found = [self._made_to_fit(ends) for ends in starts]
        self._search_from([one for one in found if one is not None])

    def _search_from(self, starts: list[Candidates]) -> None:
        under_way = [_begun(self._descend(one)) for one in starts]
        while under_way and not (self.best is not None and self.is_late):
            under_way, _ = self._advance(under_way)

    def keep(self, best: Best) -> None:
        """Keep a placement if it is faster than the best one."""
        if self.best is None or best.step < self.best.step:
            self.best = best

    def _is_done(self, most_simulated: int, lower_bound: float) -> bool:
        """Return whether effort or time is used up, or the best placement meets ``lower_bound``."""
        assert self.best is not None
        return self.best.step <= lower_bound or self.evaluator.num_simulated >= most_simulated or self.is_late

    def improve(self, most_simulated: int, lower_bound: float = 0) -> None:
        """Descend from perturbed placements until effort, patience or time ends, or the best one is optimal."""
        assert self.best is not None
        current, since, quiet = self.best, 0, 0
        under_way: list[tuple[Descent, Request]] = []
        while not self._is_done(most_simulated, lower_bound):
            if quiet > SETTINGS.search_patience + SETTINGS.search_more_patience * (self.perturbed - quiet):
                break
            for _ in range(SETTINGS.search_side_by_side - len(under_way)):
                self.perturbed, since, quiet = self.perturbed + 1, since + 1, quiet + 1
                found = self.perturbed_from(current)
                if found is not None:
                    under_way.append(_begun(self._descend(found)))
            before = self.best.step
            under_way, ended = self._advance(under_way)
            for end in ended:
                if end.step <= current.step * (1 + SETTINGS.search_forgiven):
                    current = end
            if self.best.step < before:
                current, since, quiet = self.best, 0, 0
            if since >= SETTINGS.search_restart:
                current, since = self.best, 0

    def _advance(self, under_way: list[tuple[Descent, Request]]) -> tuple[list[tuple[Descent, Request]], list[Best]]:
        """Advance every descent by one replay. Return the unfinished ones, and the results of the others."""
        going, ended = list[tuple[Descent, Request]](), list[Best]()
        replays = self.evaluator.replay([request for _, request in under_way])
        for (descent, request), replay in zip(under_way, replays, strict=True):
            if replay.step < request.to_beat:
                self.keep(Best(request.some.take(numpy.array([replay.place])), replay.step, replay.passes))
            try:
                going.append((descent, descent.send(replay)))
            except StopIteration as stop:
                ended.append(stop.value)
        return going, ended

    def _weights(self, passes: Array) -> Array:
        """Return the cost of a tick of recomputation, by virtual stage: high on the critical path."""
        problem = self.evaluator.problem
        return numpy.full(problem.num_virtual, SETTINGS.search_other_places * problem.num_microbatches) + passes

    def _made_to_fit(self, ends: Array) -> Candidates | None:
        """Return the placement, or one near it that fits, reached by moves that lower the overrun; else ``None``."""
        evaluator = self.evaluator
        weights = self._weights(self._nowhere)
        over = int(evaluator.overrun(ends[None])[0])
        while not self.is_late or (self.best is None and time.monotonic() < self.no_later):
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
            around, overs = around[overs < over], overs[overs < over]
            if not len(around):
                return None
            # The smallest overrun may be slow: among all smaller overruns, take the placement with the lowest bound.
            place = int(evaluator.plain_bounds(around).argmin())
            ends, over = around[place], int(overs[place])
        return None

    def _around(self, ends: Array) -> Array:
        moved = ends + self.moves
        return moved[self.evaluator.row.is_cut(moved)]

    def perturbed_from(self, best: Best, most_kicks: int = SETTINGS.search_most_kicks) -> Candidates | None:
        """Return a placement that fits, some random moves away; ``None`` if there is none near."""
        ends = best.one.ends[0]
        kicks = int(self._random.integers(2, most_kicks + 1)) if len(self.moves) else 0
        for _ in range(kicks):
            moved = ends + self.moves[int(self._random.integers(len(self.moves)))]
            if self.evaluator.row.is_cut(moved[None])[0]:
                ends = moved
        found = self.evaluator.candidates(ends[None], self._weights(best.passes))
        return found if len(found) else self._made_to_fit(ends)

    def _descend(self, one: Candidates) -> Descent:
        evaluator = self.evaluator
        replay = yield Request(one, inf)
        while not self.is_late:
            around = [evaluator.candidates(self._around(one.ends[0]), self._weights(replay.passes))]
            if one.extra.any():
                around.append(evaluator.variants(one))
            found = yield from self._faster(Candidates.join(around), replay.step)
            if found is None:
                break
            one, replay = found
        return Best(one, replay.step, replay.passes)

    def _faster(self, around: Candidates, step: int) -> Generator[Request, Replay, tuple[Candidates, Replay] | None]:
        """Return the fastest candidate of the first batch with one faster than ``step``, or ``None``."""
        evaluator = self.evaluator
        bounds = evaluator.bounds(around, enough=step)
        left = numpy.flatnonzero(bounds < step)
        left = left[numpy.argsort(bounds[left], kind="stable")]
        size, known = SETTINGS.search_first_batch, evaluator.num_learned
        while len(left) and not self.is_late:
            batch = around.take(left[:size])
            replay = yield Request(batch, step)
            if replay.step < step:
                return batch.take(numpy.array([replay.place])), replay
            left, size = left[size:], min(SETTINGS.search_most_in_batch, 2 * size)
            left = left[evaluator.bounds(around.take(left), since=known, enough=step) < step]
            known = evaluator.num_learned
        return None


def _begun(descent: Descent) -> tuple[Descent, Request]:
    return descent, next(descent)


def simple_splits(row: LayerRow) -> Array:
    """Return the boundaries of distinct splits, ``[split, num_virtual + 1]``; those even in time first."""
    problem = row.problem
    work = (row.forward + row.backward).astype(float) + 1e-3 * numpy.arange(row.num_layers + 1)
    found: list[Array] = []
    weights: list[Array] = [work, numpy.arange(row.num_layers + 1).astype(float)]
    for weight in weights:
        for lighter in SETTINGS.starts_lighter_ends if problem.num_chunks > 1 else SETTINGS.starts_lighter_ends[:1]:
            share = numpy.ones(problem.num_virtual)
            share[-problem.num_stages :] *= 1 - lighter
            share[: problem.num_stages] *= 1 - lighter / 2
            found.append(row.even(weight, share))
    splits: Array = numpy.array([*found, *_whole_layers(row)])
    _, first = numpy.unique(splits, axis=0, return_index=True)
    splits = splits[numpy.sort(first)]
    return splits[row.is_cut(splits)]


def _whole_layers(row: LayerRow) -> list[Array]:
    """Return splits as recipes use them: equal layers per virtual stage, some with one more, the ends with fewer."""
    num = row.problem.num_virtual
    lead, trail = _blocks(row, forwards=True), _blocks(row, forwards=False)
    layers = row.num_layers - lead - trail
    if layers < num:
        return []
    found: list[Array] = []
    for first in SETTINGS.starts_fewer_first:
        for last in SETTINGS.starts_fewer_last:
            base, more = divmod(layers + first + last, num)
            inner = numpy.arange(1, max(2, num - 1))
            spread = inner[numpy.linspace(0, len(inner) - 1, min(more, len(inner))).astype(int)]
            for places in (inner[:more], inner[-more:] if more else inner[:0], spread):
                counts = numpy.full(num, base)
                counts[places] += 1
                counts[0] -= first
                counts[-1] += layers - counts.sum()
                ends = numpy.concatenate([[0], lead + numpy.cumsum(counts)])
                ends[-1] = row.num_layers
                if (counts >= 0).all():
                    found.append(ends)
    return found


def _blocks(row: LayerRow, *, forwards: bool) -> int:
    """Return the number of layers in short runs (embedding, loss) at one end of the row."""
    sizes = [s.num_layers for s in row.problem.segments if s.beside is None]
    total = 0
    for size in sizes if forwards else reversed(sizes):
        if size > SETTINGS.starts_short:
            return total
        total += size
    return 0
