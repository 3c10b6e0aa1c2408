"""Parallel branches: branch and bound over the options of every stage, with bounds from dual prices.

A query asks whether any plan takes at most a target step time. The bound drops options above the target; branching
divides the others (``divisions.py``). Local search finds plans, starting also from roundings of the mixtures.
"""

from __future__ import annotations

import time
from math import inf

import numpy

from mindspeed_autoparallel.planner.split.bounds.divisions import Choice, divided
from mindspeed_autoparallel.planner.split.bounds.option_mixture import Mixture, Prices
from mindspeed_autoparallel.planner.split.bounds.relaxation import cut_of, relaxed_cuts
from mindspeed_autoparallel.planner.split.heuristics.baselines import best_baseline
from mindspeed_autoparallel.planner.split.heuristics.layer_moves import LayerMoves
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.model.solution import Placement, longest_step
from mindspeed_autoparallel.planner.split.model.stage_options import StageOptions
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.planner.split.state import LONGEST, State
from mindspeed_autoparallel.planner.split.strategies.chain_solver import first_cuts


def may_be_side_by_side(problem: SplitProblem) -> bool:
    """Return whether every stage has one chunk, and 64-bit sums of ticks do not overflow."""
    return problem.num_chunks == 1 and not problem.in_flight and longest_step(problem) <= LONGEST


def search_side_by_side(state: State) -> None:
    """Search the stages' options for parallel branches; proves nothing if stages have too many options."""
    if relaxed_cuts(state.problem, state.limits.deadline, most_rounds=1) is None:
        raise state.infeasible()
    search = _Search(state)
    for ceiling in SETTINGS.beside_ceilings:
        if ceiling == inf and search.best_time > LONGEST:
            break
        if not search.run(int(min(ceiling * search.alike, LONGEST))):
            if not state.rounds:
                return
            break
        if state.closed or search.is_over():
            break
    state.cuts, state.by_stages = tuple(search.cuts), True
    state.done = state.placement is not None and (state.closed or state.limits.effort is not None)


class _Search:
    def __init__(self, state: State) -> None:
        self.state, self.problem, self.deadline = state, state.problem, state.limits.deadline
        problem, limits = state.problem, state.limits
        self.without_plan = SETTINGS.beside_without_plan
        begun = time.monotonic()
        self.nearly_until = begun + SETTINGS.beside_nearly_share * (self.deadline - begun)
        self.nodes_left, self.replays_left = (
            limits.most_effort * SETTINGS.effort_divisions,
            limits.most_effort * SETTINGS.effort_replays,
        )
        self.cuts: dict[Cut, None] = first_cuts(problem)
        work = sum(s.num_layers * (s.forward + s.backward) for s in problem.segments)
        num, microbatches = problem.num_stages, problem.num_microbatches
        self.alike = max(
            state.unit, (work / num + 2 * problem.per_operation) * (microbatches + num - 1) + 2 * sum(problem.link)
        )
        """Step time of equal stages, in ticks."""
        self.columns_of: dict[Cut, list[tuple[int, int]]] = {}
        """By cut: the columns from which the mixture of that cut alone starts."""
        self.futile: set[Cut] = set()
        """Cuts that alone dropped few options in the present query."""
        self.drawn = numpy.random.default_rng(limits.seed)
        self.table = StageOptions(problem, 0)
        self.moves = LayerMoves(problem, self.table.choice, self.cuts, limits.seed)
        simple = best_baseline(problem) if limits.below is None else None
        if simple is not None:
            self._learn(simple.placement)
            held = numpy.array([numpy.sum(kinds, axis=0) for kinds in simple.placement]).T
            self.moves.add([held], self.deadline)
            self._take_over()

    @property
    def best_time(self) -> int:
        """Return the step time that a better plan must undercut."""
        return int(min(self.state.limit, 2 * LONGEST))

    def run(self, ceiling: int) -> bool:
        """Search for plans that take at most ``ceiling``. Return ``False`` if their options are too many to list."""
        ceiling = min(ceiling, self._limit())
        self.table = StageOptions(self.problem, ceiling)
        self.moves.choice = self.table.choice
        if not self.table.is_complete:
            return False
        root = Choice(list(self.table.first))
        if root.is_empty():
            self.state.raise_bound(ceiling + 1)
            return True
        self.state.rounds += 1
        self.without_plan = SETTINGS.beside_without_plan
        root.cuts = list(self.cuts)
        prices, mixed = self._bounded(root, ceiling)
        if root.is_empty():
            self.state.raise_bound(ceiling + 1)
        if prices is None or root.is_empty():
            return True
        self.state.raise_bound(min(prices.bound, ceiling + 1))
        if prices.bound > ceiling:
            return True
        self._round(mixed)
        self._perturb(SETTINGS.beside_first_perturbations)
        share, nodes = SETTINGS.beside_first_share, SETTINGS.beside_first_nodes
        state = self.state
        while state.lower_bound <= min(ceiling, self._limit()) and not self.is_over():
            if state.placement is None and self.without_plan < 0:
                return True
            limit = min(ceiling, self._limit())
            target = min(limit, state.lower_bound + int((limit - state.lower_bound) * share))
            before = self.best_time
            if self._none_within(root, target, nodes):
                state.raise_bound(target + 1)
                share = min(SETTINGS.beside_most_share, 1.5 * share)
            elif self.best_time >= before:
                share, nodes = share / 2, 2 * nodes
                self._perturb(SETTINGS.beside_later_perturbations)
        return True

    def _limit(self) -> int:
        """Return the longest step time of a better plan."""
        return self.best_time - self.state.unit

    def is_over(self) -> bool:
        """Return whether nodes or time are used up. Without a plan, or with a small gap, part of the time is left for
        other strategies."""
        state = self.state
        goes_on = state.placement is not None and state.lower_bound < SETTINGS.beside_nearly * state.step_time
        return self.nodes_left <= 0 or time.monotonic() > (self.deadline if goes_on else self.nearly_until)

    def _none_within(self, root: Choice, target: int, most_nodes: int) -> bool:
        """Return whether it is proved that no plan takes at most ``target``. If not, such a plan was found, or nodes or
        time are used up."""
        self.futile.clear()
        stack = [Choice(list(root.options), 0, list(root.cuts), list(root.columns))]
        for number in range(most_nodes):
            if not stack:
                return True
            if self.is_over():
                return False
            choice = stack.pop()
            if choice.is_empty():
                continue
            self.nodes_left -= 1
            self.without_plan -= 1
            mixed = self._narrowed(choice, target)
            if mixed is None:
                continue
            if number % SETTINGS.beside_every == 0:
                self._round(mixed)
            if all(len(options) == 1 for options in choice.options):
                self._visit(self.table.counts[[int(options[0]) for options in choice.options]])
            else:
                stack += divided(self.table, choice, self.cuts, mixed)
            if self.best_time <= target:
                return False
        return not stack

    def _narrowed(self, choice: Choice, target: int) -> Array | None:
        """Drop options that are in no plan within ``target``; return the mixture of the others, ``None`` without a
        plan."""
        most = target * (1 + 1e-9) + 1
        while True:
            before = choice.size()
            prices, mixed = self._bounded(choice, target)
            if choice.is_empty():
                return None
            if prices is None:
                return mixed
            if prices.bound > most or not self._narrowed_by_each(choice, target):
                return None
            if choice.size() > SETTINGS.beside_worthwhile * before or time.monotonic() > self.deadline:
                return mixed

    def _narrowed_by_each(self, choice: Choice, target: int) -> bool:
        """Drop options by the bound of every single cut, which the weighted bound may miss. Return whether any plan may
        be left."""
        for cut in choice.cuts:
            if cut in self.futile:
                continue
            before = choice.size()
            alone = Choice(choice.options, 0, [cut], self.columns_of.get(cut, []))
            mixture = Mixture(self.table, alone, None, self.moves.simulator, self.alike)
            prices, _ = mixture.run(target, self.deadline)
            if choice.is_empty():
                return False
            if prices is None:
                continue
            mixture.used(prices)
            self.columns_of[cut] = alone.columns
            if prices.bound > target * (1 + 1e-9) + 1:
                return False
            mixture.drop(prices, target)
            if choice.size() > (1 - SETTINGS.beside_futile) * before:
                self.futile.add(cut)
            if time.monotonic() > self.deadline:
                break
        return not choice.is_empty()

    def _bounded(self, choice: Choice, limit: int) -> tuple[Prices | None, Array]:
        mixture = Mixture(self.table, choice, self.cuts, self.moves.simulator, self.alike)
        prices, mixed = mixture.run(limit, self.deadline)
        if prices is not None:
            mixture.used(prices)
            if prices.bound <= limit:
                mixture.drop(prices, limit)
        return prices, mixed

    def _round(self, mixed: Array) -> None:
        """Descend from roundings of a mixture."""
        starts: dict[bytes, Array] = {}
        for turn in range(SETTINGS.beside_rounded):
            begun = numpy.cumsum(mixed, axis=0)
            offset = self.drawn.random(len(mixed[0])) if turn else numpy.full(len(mixed[0]), 0.5)
            ends = numpy.floor(begun + offset + 1e-9).astype(numpy.int64)
            ends[-1] = [s.num_layers for s in self.problem.segments]
            counts = numpy.diff(numpy.minimum(ends, ends[-1]), axis=0, prepend=0)
            starts[counts.tobytes()] = counts
        self.moves.add(list(starts.values()), self.deadline, 1)
        self._take_over()

    def _perturb(self, for_each_move: int) -> None:
        before = self.moves.replays
        self.moves.perturb(int(min(for_each_move * len(self.moves), self.replays_left)), self.deadline)
        self.replays_left -= self.moves.replays - before
        self._take_over()

    def _take_over(self) -> None:
        if self.moves.best is not None and self.moves.best_time < self.best_time:
            self._learn(self.table.placement(self.moves.best))

    def _visit(self, counts: Array) -> None:
        """Simulate the placement of the only options left, if it is a valid plan."""
        totals = [s.num_layers for s in self.problem.segments]
        if counts.sum(axis=0).tolist() == totals and self.moves.in_order(counts[None])[0]:
            self._learn(self.table.placement(counts))

    def _learn(self, placement: Placement) -> None:
        cut, length = cut_of(self.problem, placement)
        self.cuts[cut] = None
        self.state.offer(placement, length)
