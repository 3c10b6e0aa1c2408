"""Exact solution of small problems: all placements, bounded by critical paths and simulated if one may be the best.

After every stage the layers placed so far form an order ideal: no segment has begun before its predecessors are
complete. A placement is a path of such ideals. Of the recompute choices of a rank only those with undominated added
backward times matter, since every schedule is monotone in stage times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeAlias

import numpy
from numpy.typing import NDArray

from mindspeed_autoparallel.planner.split.bounds.whole_ranks import rank_cuts
from mindspeed_autoparallel.planner.split.model.cuts import CriticalPath, Cut
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.rank_ways import AllRankWays
from mindspeed_autoparallel.planner.split.model.solution import batch_simulator, longest_step, step_at, tails_of
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.planner.split.state import State
from mindspeed_autoparallel.schedule import BatchSimulator

LONGEST = 2**52
"""Longest step in ticks, so that floating-point numbers are exact."""

Integers: TypeAlias = NDArray[numpy.int64]
Floats: TypeAlias = NDArray[numpy.float64]


def enumerate_all(state: State) -> int:
    """Find the fastest of all placements. Return the number of placements of layers; 0 if there are too many, with
    nothing found or proved."""
    problem = state.problem
    many = 2 * problem.num_virtual * problem.num_microbatches > SETTINGS.enumeration_most_events
    if (many and problem.schedule == "gpipe") or longest_step(problem) > LONGEST:
        return 0
    ideals = _ideals(problem)
    paths = None if ideals is None else _paths(problem, ideals, SETTINGS.enumeration_most_placements)
    if ideals is None or paths is None or not _Search(state, ideals[paths]).run():
        return 0
    if state.placement is None and state.limits.below is None:
        raise state.infeasible()
    return len(paths)


def every_split(problem: SplitProblem, most: int) -> Integers | None:
    """Return the layers of every split without empty stages, ``[split, virtual stage, segment]``; ``None`` if there are
    more than ``most`` splits."""
    ideals = _ideals(problem)
    paths = None if ideals is None else _paths(problem, ideals, most)
    if ideals is None or paths is None or len(paths) > most:
        return None
    held: Integers = numpy.diff(ideals[paths], axis=1)
    return held[held.any(axis=2).all(axis=1)]


def plain_steps(problem: SplitProblem, held: Integers) -> Floats:
    """Return the ticks of every split ``held``, ``[split, virtual stage, segment]``, with nothing recomputed."""
    forward = held @ numpy.array([segment.forward for segment in problem.segments])
    backward = held @ numpy.array([segment.backward for segment in problem.segments])
    steps: Floats = batch_simulator(problem).step_times(forward, backward) + tails_of(problem, held)[1]
    return steps


def _ideals(problem: SplitProblem) -> Integers | None:
    """Return the order ideals, ``[ideal, segment]``: layers before a boundary. ``None`` if there are too many."""
    most = SETTINGS.enumeration_most_placements if problem.num_virtual == 2 else SETTINGS.enumeration_most_ideals
    segments = problem.segments
    found: Integers = numpy.zeros((1, 0), dtype=numpy.int64)
    for segment in segments:
        totals = [segments[before].num_layers for before in segment.predecessors]
        may_begin = (found[:, list(segment.predecessors)] == totals).all(axis=1)
        sizes = numpy.where(may_begin, segment.num_layers + 1, 1)
        if sizes.sum() > most:
            return None
        rows: Integers = numpy.repeat(numpy.arange(len(found)), sizes)
        number = numpy.arange(len(rows)) - numpy.repeat(numpy.cumsum(sizes) - sizes, sizes)
        found = numpy.concatenate([found[rows], number[:, None]], axis=1)
    return found[~problem.breaks_joint(found)]


def _paths(problem: SplitProblem, ideals: Integers, most: int) -> Integers | None:
    """Return all placements as indices into ``ideals``, ``[placement, num_virtual + 1]``.

    ``None`` if there are more than ``most`` with three virtual stages or more.
    """
    num = problem.num_virtual
    totals = [segment.num_layers for segment in problem.segments]
    (root,), (end,) = (numpy.flatnonzero((ideals == whole).all(axis=1)) for whole in (0, totals))
    if num == 1:
        return numpy.array([[root, end]])
    if num == 2:
        inner = numpy.flatnonzero(_follows(problem, ideals[root], ideals) & _follows(problem, ideals, ideals[end]))
        return numpy.stack([numpy.full(len(inner), root), inner, numpy.full(len(inner), end)], axis=1)
    follows = numpy.stack([_follows(problem, ideal, ideals) for ideal in ideals])
    # By number of stages left: the ideals from which a path to the end exists.
    ways = [numpy.arange(len(ideals)) == end]
    counts: Floats = ways[0].astype(float)
    for _ in range(num):
        counts = follows @ counts
        ways.append(counts > 0)
    if counts[root] > most:
        return None
    paths = numpy.array([[root]])
    for left in reversed(range(num)):
        row, after = numpy.nonzero(follows[paths[:, -1]] & ways[left])
        paths = numpy.concatenate([paths[row], after[:, None]], axis=1)
    return paths


def _follows(problem: SplitProblem, before: Integers, after: Integers) -> NDArray[numpy.bool_]:
    """Return whether one virtual stage may hold the layers between the ideals ``before`` and ``after``."""
    held = after - before
    legal: NDArray[numpy.bool_] = (held >= 0).all(axis=-1)
    for k, segment in enumerate(problem.segments):
        if segment.beside is not None:
            legal &= held[..., k] <= held[..., segment.beside]
    if not problem.allow_empty_stages:
        legal &= held[..., [k for k, s in enumerate(problem.segments) if s.beside is None]].any(axis=-1)
    return legal


class _Search:
    """The search: placements in order of their bounds, until no bound is below the best step time."""

    def __init__(self, state: State, prefixes: Integers) -> None:
        self.state, self.problem = state, state.problem
        problem, self.ways = self.problem, AllRankWays(self.problem)
        self.held: Integers = numpy.diff(prefixes, axis=1)
        """``[placement, virtual stage, segment]``."""
        self.forward: Integers = self.held @ numpy.array([s.forward for s in problem.segments])
        self.plain: Integers = self.held @ numpy.array([s.backward for s in problem.segments])
        self.tail_stage, self.tail = tails_of(problem, self.held)
        self.folds = problem.schedule != "gpipe" and (
            2 * problem.num_virtual * problem.num_microbatches > SETTINGS.enumeration_folded_events
        )
        """Whether the step repeats a shorter one that is replayed, one placement after another."""
        self.cuts: dict[Cut, None] = {}
        self.best: tuple[int, Integers] | None = None
        """Index of the best placement, and its added backward time by virtual stage."""
        self.best_time = min(state.limit, longest_step(problem) + 1)
        self.num_candidates = self.num_collections = 0

    def run(self) -> bool:
        """Find the best placement. Return ``False`` if there are too many recompute choices."""
        bounds = self.tail.astype(float)
        left = numpy.arange(len(self.held))
        bounds = self._raised(bounds, left, self._learn(rank_cuts(self.problem)))
        size = SETTINGS.enumeration_first_block
        while True:
            left = left[bounds[left] < self.best_time]
            if not len(left):
                break
            left = left[numpy.argsort(bounds[left], kind="stable")]
            candidates = self._candidates(left[:size])
            if candidates is None:
                return False
            left, size = left[size:], 2 * size
            known = len(self.cuts)
            self._replay(*candidates)
            bounds = self._raised(bounds, left, list(self.cuts)[known:])
        if self.best is not None:
            place, extra = self.best
            self.state.offer(
                self.ways.placement(self.held[place], extra, SETTINGS.enumeration_most_ways), self.best_time
            )
        self.state.raise_bound(self.best_time)
        return True

    def _learn(self, cuts: list[Cut]) -> list[Cut]:
        self.cuts.update(dict.fromkeys(cuts))
        return cuts

    def _raised(self, bounds: Floats, which: Integers, cuts: list[Cut]) -> Floats:
        """Raise the bounds of the placements ``which`` by more cuts, without recomputation; return ``bounds``."""
        if cuts and len(which):
            length = self._lengths(self.forward[which], self.plain[which], cuts) + self.tail[which]
            bounds[which] = numpy.maximum(bounds[which], length)
        return bounds

    @staticmethod
    def _lengths(forward: Integers, backward: Integers, cuts: list[Cut]) -> Floats:
        """Return the length of the longest of the cuts' paths, without tails, for every row of stage times."""
        times = numpy.concatenate([forward, backward], axis=1).astype(float)
        matrix = numpy.array([[*cut.forwards, *cut.backwards] for cut in cuts], dtype=float)
        longest: Floats = (times @ matrix.T + numpy.array([cut.constant for cut in cuts], dtype=float)).max(axis=1)
        return longest

    def _candidates(self, which: Integers) -> tuple[Integers, Integers] | None:
        """Return the placements ``which`` with all recompute choices that fit: indices of placements, and added
        backward times by virtual stage; ``None`` if there are too many."""
        problem, size = self.problem, self.problem.num_stages
        by_rank: list[tuple[Integers, Integers, Integers]] = []
        choices: Integers = numpy.ones(len(which), dtype=numpy.int64)
        for rank in range(size):
            found = self._extras(rank, which)
            if found is None:
                return None
            by_rank.append(found)
            _, number, inverse = found
            choices *= number[inverse]
            if choices.sum() > SETTINGS.enumeration_most_placements:
                return None
        self.num_candidates += int(choices.sum())
        if self.num_candidates > SETTINGS.enumeration_most_placements:
            return None
        rows: Integers = numpy.repeat(numpy.arange(len(which)), choices)
        place = numpy.arange(len(rows)) - numpy.repeat(numpy.cumsum(choices) - choices, choices)
        extra: Integers = numpy.zeros((len(rows), problem.num_virtual), dtype=numpy.int64)
        for rank, (every, number, inverse) in enumerate(by_rank):
            if len(rows):
                first = numpy.cumsum(number) - number
                kind = inverse[rows]
                extra[:, rank::size] = every[first[kind] + place % number[kind]]
                place //= number[kind]
        return which[rows], extra

    def _extras(self, rank: int, which: Integers) -> tuple[Integers, Integers, Integers] | None:
        """Return the recompute choices of a rank for every collection of layers that it holds in these placements.

        These are the added backward times, ``[way, chunk]``; the number of ways by collection; and the collection of
        each placement. ``None`` if there are too many.
        """
        size, chunks = self.problem.num_stages, self.problem.num_chunks
        held = self.held[which, rank::size].reshape(len(which), -1)
        different, inverse = numpy.unique(held, axis=0, return_inverse=True)
        different = different.reshape(len(different), chunks, len(self.problem.segments))
        plain = self._fits_plainly(rank, different)
        (fitting,), (others,) = numpy.nonzero(plain), numpy.nonzero(~plain)
        nothing: Integers = numpy.zeros((len(different), chunks), dtype=numpy.int64)
        if not len(others):
            return nothing, numpy.ones(len(different), dtype=numpy.int64), inverse.reshape(-1)
        ways = self.ways.of(rank, different[others], SETTINGS.enumeration_most_ways)
        self.num_collections += len(others)
        if ways is None or self.num_collections > SETTINGS.enumeration_most_collections:
            return None
        owner = numpy.concatenate([fitting, others[ways.owner]])
        extra = numpy.concatenate([nothing[fitting], ways.extra])
        number = numpy.bincount(owner, minlength=len(different))
        return extra[numpy.argsort(owner, kind="stable")], number, inverse.reshape(-1)

    def _fits_plainly(self, rank: int, held: Integers) -> NDArray[numpy.bool_]:
        """Return which collections, ``[collection, chunk, segment]``, fit on a rank without recomputation."""
        problem = self.problem
        plain = [segment.kinds[0] for segment in problem.segments]
        if any(kind.extra_backward for kind in plain):
            return numpy.zeros(len(held), dtype=bool)
        stages = range(rank, problem.num_virtual, problem.num_stages)
        memory = numpy.array([[kind.memory[v] for kind in plain] for v in stages])
        saved = held @ numpy.array([kind.saved for kind in plain])
        used = (held * memory).sum(axis=(1, 2)) + (saved @ numpy.array(problem.moments(rank)).T).max(axis=1)
        transients = numpy.where(held.any(axis=1), [kind.transient for kind in plain], 0).max(axis=1)
        fits: NDArray[numpy.bool_] = used + transients <= problem.memory_limit[rank]
        return fits

    def _replay(self, places: Integers, extra: Integers) -> None:
        """Simulate the candidates that may be faster than the best, lowest bounds first."""
        forward, backward, tail = self.forward[places], self.plain[places] + extra, self.tail[places]
        bounds: Floats = tail + self._lengths(forward, backward, list(self.cuts))
        left = numpy.flatnonzero(bounds < self.best_time)
        size = SETTINGS.enumeration_folded if self.folds else SETTINGS.enumeration_replayed
        while len(left):
            left = left[numpy.argsort(bounds[left], kind="stable")]
            some, left = left[:size], left[size:]
            ends, path_of = self._ends(forward[some], backward[some])
            steps = ends + tail[some]
            fastest = int(steps.argmin())
            if steps[fastest] < self.best_time:
                self.best = int(places[some[fastest]]), extra[some[fastest]]
                self.best_time = int(steps[fastest])
            worst = numpy.argsort(bounds[some] - steps, kind="stable")[: SETTINGS.enumeration_learned]
            fresh: list[Cut] = []
            for index in {fastest, *worst.tolist()}:
                cut = Cut.of(path_of(index), forward[some[index]], backward[some[index]], ends[index])
                if cut not in self.cuts:
                    fresh.append(cut)
            if fresh and len(left):
                raised = tail[left] + self._lengths(forward[left], backward[left], fresh)
                bounds[left] = numpy.maximum(bounds[left], raised)
            self._learn(fresh)
            left = left[bounds[left] < self.best_time]

    @cached_property
    def _simulator(self) -> BatchSimulator:
        return batch_simulator(self.problem)

    def _ends(self, forward: Integers, backward: Integers) -> tuple[Floats, Callable[[int], CriticalPath]]:
        """Return the step times without tails, and a function for the critical path of one."""
        if not self.folds:
            return self._simulator.replay(forward, backward)
        steps = [step_at(self.problem, *times) for times in zip(forward.tolist(), backward.tolist(), strict=True)]
        return numpy.array([step.step_time for step in steps], dtype=float), steps.__getitem__
