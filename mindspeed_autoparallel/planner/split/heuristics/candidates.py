"""Evaluation of many placements at once: step times, memory, and lower bounds from known cuts."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.layer_row import LayerRow
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.rank_kinds import RankKinds, RankWays
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.model.solution import Placement, batch_simulator, tails_of
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.schedule import BatchSimulator


@dataclass
class Candidates:
    """Placements that fit in memory, one per row; times are in ticks."""

    ends: Array
    """``[candidate, num_virtual + 1]``: layers placed before every virtual stage; the last entry is all layers."""
    extra: Array
    """``[candidate, virtual stage]``: added backward time of recomputation."""
    forward: Array
    backward: Array
    """Backward time with recomputation."""
    tail_stage: Array
    tail: Array

    def __len__(self) -> int:
        return len(self.ends)

    def take(self, which: Array) -> Candidates:
        """Return the candidates ``which``."""
        return Candidates(*(getattr(self, name)[which] for name in _FIELDS))

    @staticmethod
    def join(parts: list[Candidates]) -> Candidates:
        """Return the candidates of all ``parts``, in order."""
        return Candidates(*(numpy.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


@dataclass(frozen=True)
class Request:
    """Candidates to be replayed."""

    some: Candidates
    to_beat: float
    """Step time to beat."""


@dataclass(frozen=True)
class Replay:
    """The answer to a request."""

    place: int
    """Index of the fastest candidate."""
    step: int
    """Step time of the fastest candidate."""
    passes: Array
    """Backwards by virtual stage on the critical path that became a cut: that of the fastest candidate if its step
    time is below ``to_beat``, else that of the first."""


class OutOfTime(Exception):
    """The deadline passed while candidates were computed."""


_FIELDS = ("ends", "extra", "forward", "backward", "tail_stage", "tail")


class Evaluator:
    """Step times of candidates from the exact schedule, and lower bounds from the cuts found so far."""

    def __init__(self, problem: SplitProblem, deadline: float = math.inf) -> None:
        self.problem, self.deadline = problem, deadline
        self.row, self.kinds = LayerRow(problem), RankKinds(problem)
        self.cuts: dict[Cut, None] = {}
        self.num_simulated = self.num_learned = 0
        num, size = problem.num_virtual, problem.num_stages
        self._matrix: Array = numpy.zeros((0, 2 * num))
        self._constant: Array = numpy.zeros(0)
        hashing = numpy.random.default_rng(0)
        hashes = hashing.integers(1, 2**62, (problem.num_chunks, len(problem.segments)), dtype=numpy.int64)
        self._shape = (problem.num_chunks, size)
        self._plain: Array = numpy.array([[s.kinds[0].memory[v] for s in problem.segments] for v in range(num)])
        self._saved: Array = numpy.array([s.kinds[0].saved for s in problem.segments])
        self._transient = max(s.kinds[0].transient for s in problem.segments)
        self._is_free = not any(s.kinds[0].extra_backward for s in problem.segments)
        self._rooms: Array = numpy.array(problem.memory_limit)
        most = [[problem.most_memory(s.kinds[0], v) for s in problem.segments] for v in range(num)]
        # By virtual stage: a hash of the layers before every place of the row, and their most memory.
        self._hashed: Array = numpy.repeat(hashes @ self.row.counts.T, size, axis=0)
        self._most: Array = numpy.array(most) @ self.row.counts.T
        self._extras: dict[int, Array] = {}
        """By key of a rank's layers: the added backward times of its recompute choices."""

    @functools.cached_property
    def simulator(self) -> BatchSimulator:
        """Return the simulator of the problem's schedule; created on first use, as sorting its events is slow."""
        return batch_simulator(self.problem)

    def candidates(self, ends: Array, weights: Array) -> Candidates:
        """Return the candidates among ``ends`` that fit, each with the cheapest recomputation.

        ``weights``: cost of a tick of recomputation, by virtual stage.
        """
        extra, fits = self._least_extra(ends, weights)
        return self.placed(ends[fits], extra[fits])

    def variants(self, one: Candidates) -> Candidates:
        """Return the candidate with each other recompute choice of one rank at a time."""
        held, rows = self.row.held(one.ends)[0], list[Array]()
        for rank in range(self.problem.num_stages):
            ways = self.ways_of(rank, held).extra
            for way in ways if len(ways) > 1 else ():
                changed = one.extra[0].copy()
                changed[rank :: self.problem.num_stages] = way
                rows.append(changed)
        many = numpy.repeat(one.ends, len(rows), axis=0)
        return self.placed(many, numpy.array(rows).reshape(len(rows), self.problem.num_virtual))

    def placed(self, ends: Array, extra: Array) -> Candidates:
        """Return the candidates with these boundaries and added backward times, which must fit."""
        stage, tail = self._tails(ends)
        forward, backward = self.row.forward_times(ends), self.row.backward_times(ends) + extra
        return Candidates(ends, extra, forward, backward, stage, tail)

    def _tails(self, ends: Array) -> tuple[Array, Array]:
        return tails_of(self.problem, self.row.held(ends) if self.problem.tails else ends)

    def overrun(self, ends: Array) -> Array:
        """Return the sum over ranks of memory above the limit, by candidate, with the leanest kind for every layer."""
        problem = self.problem
        held = self.row.held(ends)
        least = [[problem.leanest(segment, v) for segment in problem.segments] for v in range(problem.num_virtual)]
        memory = numpy.array([[kind.memory[v] for kind in row] for v, row in enumerate(least)])
        saved = numpy.array([[kind.saved for kind in row] for row in least])
        transient = max(kind.transient for row in least for kind in row)
        used = self._used(held, memory, saved) + transient - self._rooms
        return numpy.maximum(used, 0).sum(axis=1)

    def _used(self, held: Array, memory: Array, saved: Array) -> Array:
        """Return peak memory without transients, ``[candidate, rank]``."""
        base = (held * memory).sum(axis=2).reshape(len(held), *self._shape).sum(axis=1)
        copies = (held * saved).sum(axis=2).reshape(len(held), *self._shape)
        fullest = [
            (copies[:, :, stage] @ numpy.array(self.problem.moments(stage)).T).max(axis=1)
            for stage in range(self.problem.num_stages)
        ]
        return base + numpy.stack(fullest, axis=1)

    def _least_extra(self, ends: Array, weights: Array) -> tuple[Array, Array]:
        """Return added backward time, ``[candidate, virtual stage]``, and which candidates fit."""
        num, size = len(ends), self.problem.num_stages
        fit_plainly = self._by_rank(self._most, ends) + self._transient <= self._rooms
        if not num or (self._is_free and fit_plainly.all()):
            return numpy.zeros((num, self.problem.num_virtual), dtype=numpy.int64), numpy.ones(num, dtype=bool)
        keys = self._by_rank(self._hashed, ends) * size + numpy.arange(size)
        # Moves change few ranks, so most keys are those of the first candidate: sort the others only.
        other: Array = keys != keys[:1]
        other[0] = True
        candidate, rank = numpy.nonzero(other)
        distinct, first, inverse = numpy.unique(keys[other], return_index=True, return_inverse=True)
        best: list[Array] = []
        for key, index in zip(distinct.tolist(), first.tolist(), strict=True):
            if time.monotonic() > self.deadline:
                raise OutOfTime
            here = int(rank[index])
            if key not in self._extras:
                held = self.row.held(ends[candidate[index]][None])[0]
                self._extras[key] = self.extras_of(here, held[here::size])
            ways = self._extras[key]
            cost = ways @ weights[here::size]
            best.append(ways[int(cost.argmin())] if len(cost) else numpy.full(self._shape[0], -1))
        # The first candidate's ranks come first.
        chosen: Array = numpy.repeat(inverse[None, :size], num, axis=0)
        chosen[candidate, rank] = inverse
        extra: Array = numpy.array(best)[chosen].transpose(0, 2, 1)
        return extra.reshape(num, self.problem.num_virtual), (extra >= 0).all(axis=(1, 2))

    def _by_rank(self, before: Array, ends: Array) -> Array:
        """Return sums over the layers of every rank, ``[candidate, rank]``; ``before``: those over the layers before
        every place of the row, by virtual stage."""
        v = numpy.arange(self.problem.num_virtual)
        held = before[v, ends[:, 1:]] - before[v, ends[:, :-1]]
        return held.reshape(len(ends), *self._shape).sum(axis=1)

    def extras_of(self, rank: int, held: Array) -> Array:
        """Return added backward times of a rank's recompute choices, ``[way, chunk]``; only 0 if it needs none.

        ``held``: layers, ``[chunk, segment]``.
        """
        copies = numpy.array(self.problem.moments(rank)) @ (held @ self._saved)
        used = (held * self._plain[rank :: self.problem.num_stages]).sum() + copies.max() + self._transient
        if self._is_free and used <= self._rooms[rank]:
            return numpy.zeros((1, len(held)), dtype=numpy.int64)
        return self.kinds.ways(rank, tuple(map(tuple, held.tolist()))).extra

    def ways_of(self, rank: int, held: Array) -> RankWays:
        """Return the recompute choices of a rank. ``held``: layers, ``[virtual stage, segment]``."""
        return self.kinds.ways(rank, tuple(map(tuple, held[rank :: self.problem.num_stages].tolist())))

    def steps(self, some: Candidates) -> Array:
        """Return the exact step time of every candidate, in ticks."""
        self.num_simulated += len(some)
        return self.simulator.step_times(some.forward, some.backward) + some.tail

    def replay(self, requests: list[Request]) -> list[Replay]:
        """Simulate all candidates exactly, and keep one critical path of every request as a cut."""
        answers: list[Replay] = []
        learned: list[Cut] = []
        for group in self._packed(requests):
            some = Candidates.join([request.some for request in group])
            self.num_simulated += len(some)
            times, path_of = self.simulator.replay(some.forward, some.backward)
            steps, first = times + some.tail, 0
            for request in group:
                last = first + len(request.some)
                place = int(steps[first:last].argmin())
                step = int(steps[first + place])
                at = first + place if step < request.to_beat else first
                cut = Cut.of(path_of(at), some.forward[at], some.backward[at], times[at], int(some.tail_stage[at]))
                learned.append(cut)
                answers.append(Replay(place, step, numpy.array(learned[-1][1])))
                first = last
        self.know(learned)
        return answers

    def _packed(self, requests: list[Request]) -> list[list[Request]]:
        """Return the requests in groups that fit in one replay; a request that is too large is a group of its own."""
        groups: list[list[Request]] = [[]]
        size = 0
        for request in requests:
            if groups[-1] and size + len(request.some) > self.simulator.at_once:
                groups.append([])
                size = 0
            groups[-1].append(request)
            size += len(request.some)
        return groups if groups[-1] else []

    def know(self, cuts: Iterable[Cut]) -> None:
        """Add cuts; the newest ``SETTINGS.search_most_cuts`` bound candidates."""
        fresh: list[Cut] = []
        for cut in cuts:
            if cut not in self.cuts:
                self.cuts[cut] = None
                fresh.append(cut)
        if fresh:
            self.num_learned += len(fresh)
            self._matrix = numpy.concatenate([self._matrix, [[*cut.forwards, *cut.backwards] for cut in fresh]])[
                -SETTINGS.search_most_cuts :
            ]
            self._constant = numpy.concatenate([self._constant, [cut.constant for cut in fresh]])[
                -SETTINGS.search_most_cuts :
            ]

    def bounds(self, some: Candidates, since: int = 0, enough: float = math.inf) -> Array:
        """Return a lower bound of every candidate's step time from the known cuts.

        ``since``: an earlier value of ``num_learned``; only cuts added after it count. ``enough``: older cuts are tried
        only where the newest ones give less.
        """
        number = min(len(self._constant), self.num_learned - since)
        found: Array = some.tail + 0.0
        if not number:
            return found
        times = numpy.concatenate([some.forward, some.backward], axis=1).astype(float)
        newest = SETTINGS.search_newest_cuts
        found += (times @ self._matrix[-number:][-newest:].T + self._constant[-number:][-newest:]).max(axis=1)
        left = numpy.flatnonzero(found < enough)
        if number > newest and len(left):
            older = (times[left] @ self._matrix[-number:-newest].T + self._constant[-number:-newest]).max(axis=1)
            found[left] = numpy.maximum(found[left], older + some.tail[left])
        return found

    def plain_bounds(self, ends: Array) -> Array:
        """Return a lower bound of every step time without recomputation, whether the placement fits or not."""
        stage, tail = self._tails(ends)
        forward, backward = self.row.forward_times(ends), self.row.backward_times(ends)
        return self.bounds(Candidates(ends, numpy.zeros_like(backward), forward, backward, stage, tail))

    def placement(self, one: Candidates) -> Placement:
        """Return the placement of the first candidate."""
        return self.kinds.placement(self.row.held(one.ends[:1])[0], one.extra[0])
