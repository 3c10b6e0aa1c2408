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
        shape = (problem.num_chunks, 1, len(problem.segments))
        self._hashes: Array = hashing.integers(1, 2**62, shape, dtype=numpy.int64)
        self._shape = (problem.num_chunks, size)
        self._plain: Array = numpy.array([[s.kinds[0].memory[v] for s in problem.segments] for v in range(num)])
        self._saved: Array = numpy.array([s.kinds[0].saved for s in problem.segments])
        self._transient = max(s.kinds[0].transient for s in problem.segments)
        self._is_free = not any(s.kinds[0].extra_backward for s in problem.segments)
        self._rooms: Array = numpy.array(problem.memory_limit)
        by_rank: Array = (numpy.arange(num)[:, None] % size == numpy.arange(size)).astype(float)
        most = [[problem.most_memory(s.kinds[0], v) for s in problem.segments] for v in range(num)]
        self._most: Array = (numpy.array(most)[:, :, None] * by_rank[:, None, :]).reshape(-1, size)

    @functools.cached_property
    def simulator(self) -> BatchSimulator:
        """Return the simulator of the problem's schedule; created on first use, as sorting its events is slow."""
        return batch_simulator(self.problem)

    def candidates(self, ends: Array, weights: Array) -> Candidates:
        """Return the candidates among ``ends`` that fit, each with the cheapest recomputation.

        ``weights``: cost of a tick of recomputation, by virtual stage.
        """
        held = self.row.held(ends)
        extra, fits = self._least_extra(held, weights)
        ends, held, extra = ends[fits], held[fits], extra[fits]
        stage, tail = tails_of(self.problem, held)
        forward, backward = self.row.forward_times(ends), self.row.backward_times(ends) + extra
        return Candidates(ends, extra, forward, backward, stage, tail)

    def variants(self, one: Candidates) -> Candidates:
        """Return the candidate with each other recompute choice of one rank at a time."""
        held, rows = self.row.held(one.ends)[0], list[Array]()
        for rank in range(self.problem.num_stages):
            ways = self.ways_of(rank, held).extra
            for way in ways if len(ways) > 1 else ():
                changed = one.extra[0].copy()
                changed[rank :: self.problem.num_stages] = way
                rows.append(changed)
        return self._with_extra(one.ends[0], numpy.array(rows).reshape(len(rows), self.problem.num_virtual))

    def _with_extra(self, ends: Array, extra: Array) -> Candidates:
        many = numpy.repeat(ends[None], len(extra), axis=0)
        stage, tail = tails_of(self.problem, self.row.held(many))
        backward = self.row.backward_times(many) + extra
        return Candidates(many, extra, self.row.forward_times(many), backward, stage, tail)

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

    def _least_extra(self, held: Array, weights: Array) -> tuple[Array, Array]:
        """Return added backward time, ``[candidate, virtual stage]``, and which candidates fit."""
        num, size = len(held), self.problem.num_stages
        extra: Array = numpy.zeros((num, *self._shape), dtype=numpy.int64)
        fits: Array = numpy.ones(num, dtype=bool)
        candidate, rank = numpy.nonzero(~self._runs_plainly(held))
        if len(candidate):
            keys = self._rank_keys(held)[candidate, rank]
            _, first, inverse = numpy.unique(keys, return_index=True, return_inverse=True)
            best: list[Array] = []
            for index in first:
                if time.monotonic() > self.deadline:
                    raise OutOfTime
                ways = self.ways_of(int(rank[index]), held[candidate[index]])
                cost = ways.extra @ weights[rank[index] :: size]
                best.append(ways.extra[int(cost.argmin())] if len(cost) else numpy.full(self._shape[0], -1))
            extra[candidate, :, rank] = numpy.array(best)[inverse]
            fits = (extra >= 0).all(axis=(1, 2))
        return extra.reshape(num, self.problem.num_virtual), fits

    def _runs_plainly(self, held: Array) -> Array:
        """Return which ranks surely fit without recomputation, ``[candidate, rank]``."""
        if not self._is_free:
            return numpy.zeros((len(held), self.problem.num_stages), dtype=bool)
        plainly = held.reshape(len(held), len(self._most)).astype(float) @ self._most + self._transient <= self._rooms
        return plainly if plainly.all() else self._used(held, self._plain, self._saved) + self._transient <= self._rooms

    def _rank_keys(self, held: Array) -> Array:
        """Return a hash of every rank's layers, ``[candidate, rank]``."""
        size = self.problem.num_stages
        keys: Array = (held.reshape(len(held), *self._shape, held.shape[2]) * self._hashes).sum(axis=(1, 3)) * size
        return keys + numpy.arange(size)

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

    def bounds(self, some: Candidates, since: int = 0) -> Array:
        """Return a lower bound of every candidate's step time from the known cuts.

        ``since``: an earlier value of ``num_learned``; only cuts added after it count.
        """
        number = min(len(self._constant), self.num_learned - since)
        if not number:
            return some.tail + 0.0
        times = numpy.concatenate([some.forward, some.backward], axis=1).astype(float)
        return (times @ self._matrix[-number:].T + self._constant[-number:]).max(axis=1) + some.tail

    def plain_bounds(self, ends: Array) -> Array:
        """Return a lower bound of every step time without recomputation, whether the placement fits or not."""
        stage, tail = tails_of(self.problem, self.row.held(ends))
        forward, backward = self.row.forward_times(ends), self.row.backward_times(ends)
        return self.bounds(Candidates(ends, numpy.zeros_like(backward), forward, backward, stage, tail))

    def placement(self, one: Candidates) -> Placement:
        """Return the placement of the first candidate."""
        return self.kinds.placement(self.row.held(one.ends[:1])[0], one.extra[0])
