"""Local search for placements below a target: it lowers the weighted lengths of the known cuts above the target.

The step is a maximum over paths, and where ranks recompute, most moves leave it as it is. Their sum over all cuts above
the target differs by move. At a local minimum the weights of these cuts rise, so that the search leaves it. Only
placements within the target under all known cuts are replayed; their critical paths become cuts.
"""

from __future__ import annotations

from itertools import islice
from math import inf

import numpy

from mindspeed_autoparallel.planner.split.heuristics.candidates import Candidates, OutOfTime, Request
from mindspeed_autoparallel.planner.split.heuristics.local_search import Best, LocalSearch
from mindspeed_autoparallel.planner.split.heuristics.rank_moves import RankMoves
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.settings import SETTINGS


class TargetSearch:
    """Improves the best placement of a local search."""

    def __init__(self, search: LocalSearch) -> None:
        assert search.best is not None
        self._search, self._evaluator, self._best = search, search.evaluator, search.best
        self._moves = RankMoves(search.evaluator, search.moves)
        num = search.evaluator.problem.num_virtual
        self._passes: Array = numpy.zeros((0, 2 * num))
        self._constant: Array = numpy.zeros(0)
        self._weights: Array = numpy.zeros(0)
        self._known = 0
        self._seen: set[bytes] = set()
        """Placements at which the search has been, with their recomputation."""
        self.num_moves = self.perturbed = self._last = 0
        """Moves and perturbations so far, and perturbations until the last success."""
        self._first_shifted, self._last_shifted = numpy.triu_indices(num - 1)

    def run(self, most_moves: float, lower_bound: float) -> None:
        """Search until moves, patience or time end, or the best placement meets ``lower_bound``."""
        try:
            self._run(most_moves, lower_bound)
        except OutOfTime:
            return

    def _run(self, most_moves: float, lower_bound: float) -> None:
        search = self._search
        self._learn()
        here, quiet, lowest = self._best.one, 0, inf
        while not search.is_late and self.num_moves < most_moves and self._best.step > lower_bound:
            lengths = self._lengths(here)[0]
            longest = lengths.max()
            if longest <= self._target:
                here, quiet, lowest = self._replayed(here), 0, inf
                continue
            quiet, lowest = (0, longest) if longest < lowest else (quiet + 1, lowest)
            if quiet <= SETTINGS.target_patience:
                here = self._moved(here, lengths)
                continue
            if self.perturbed - self._last > SETTINGS.search_patience + SETTINGS.search_more_patience * self._last:
                return
            here, quiet, lowest = self._begun_again(), 0, inf

    @property
    def _target(self) -> float:
        return self._best.step - max(1.0, SETTINGS.target_below * self._best.step)

    def _learn(self) -> None:
        """Take over the cuts that the evaluator has learned since, each with a weight of 1."""
        cuts = list(islice(self._evaluator.cuts, self._known, None))
        if cuts:
            self._known += len(cuts)
            passes = numpy.array([[*cut.forwards, *cut.backwards] for cut in cuts], dtype=float)
            self._passes = numpy.concatenate([self._passes, passes])
            self._constant = numpy.concatenate([self._constant, [cut.constant for cut in cuts]])
            self._weights = numpy.concatenate([self._weights, numpy.ones(len(cuts))])

    def _lengths(self, some: Candidates) -> Array:
        """Return the lengths of all cuts, ``[candidate, cut]``."""
        times = numpy.concatenate([some.forward, some.backward], axis=1).astype(float)
        found: Array = times @ self._passes.T + self._constant + some.tail[:, None]
        return found

    def _replayed(self, some: Candidates) -> Candidates:
        """Simulate placements within the target and learn their critical paths. Return the fastest one."""
        each = [some.take(numpy.array([place])) for place in range(len(some))]
        replays = self._evaluator.replay([Request(one, inf) for one in each])
        self._learn()
        step, place = min((replay.step, place) for place, replay in enumerate(replays))
        if step < self._best.step:
            self._best = Best(each[place], step, replays[place].passes)
            self._search.keep(self._best)
            self._weights[:] = 1
            self._last = self.perturbed
        return each[place]

    def _begun_again(self) -> Candidates:
        """Return a placement near the best one; reset weights."""
        self.perturbed += 1
        self._weights[:] = 1
        found = self._search.perturbed_from(self._best, SETTINGS.target_most_kicks)
        return self._best.one if found is None else found

    def _moved(self, here: Candidates, lengths: Array) -> Candidates:
        """Return the neighbour that lowers the weighted lengths above the target most; if none does, raise the weights
        and return the best neighbour under the new ones. Neighbours within the target are replayed."""
        self.num_moves += 1
        self._seen.add(_key(here))
        target = self._target
        around = self._around(here, lengths > target)
        fresh = [place for place in range(len(around)) if _key(around, place) not in self._seen]
        if not fresh:
            return self._begun_again()
        around = around.take(numpy.array(fresh))
        theirs = self._lengths(around)
        longest = theirs.max(axis=1)
        if longest.min() <= target:
            first = numpy.argsort(longest, kind="stable")[: SETTINGS.target_replayed]
            return self._replayed(around.take(first[longest[first] <= target]))
        above = numpy.maximum(theirs - target, 0)
        values = above @ self._weights
        if values.min() >= numpy.maximum(lengths - target, 0) @ self._weights:
            self._weights[lengths > target] += SETTINGS.target_raised
            values = above @ self._weights
        return around.take(values.argmin()[None])

    def _around(self, here: Candidates, above: Array) -> Candidates:
        """Return the moves that shorten the cuts ``above`` most in all, and other recompute choices of one rank."""
        moves, row, num = self._moves, self._evaluator.row, self._evaluator.problem.num_virtual
        prices = (self._weights * above) @ self._passes
        forward, backward = prices[:num], prices[num:]
        ends = here.ends[0]
        moves.go_to(ends, here.extra[0])
        values = moves.costs(backward)
        inner = ends[1:-1]
        for sign, part in ((1, slice(0, len(values) // 2)), (-1, slice(len(values) // 2, None))):
            other = numpy.clip(inner + sign, 0, row.num_layers)
            rise = (row.forward[other] - row.forward[inner]) * (forward[:-1] - forward[1:])
            rise += (row.backward[other] - row.backward[inner]) * (backward[:-1] - backward[1:])
            total = numpy.concatenate([[0], numpy.cumsum(rise)])
            values[part] += total[self._last_shifted + 1] - total[self._first_shifted]
        most = min(SETTINGS.target_moves_compared, len(values))
        chosen = numpy.argpartition(values, most - 1)[:most] if most else numpy.zeros(0, dtype=int)
        chosen = chosen[numpy.isfinite(values[chosen])]
        others = moves.cheaper_ways(backward)
        every = numpy.concatenate([ends + self._search.moves[chosen], numpy.repeat(ends[None], len(others), axis=0)])
        return self._evaluator.placed(every, numpy.concatenate([moves.extras(chosen), others]))


def _key(some: Candidates, place: int = 0) -> bytes:
    return bytes(some.ends[place]) + bytes(some.extra[place])
