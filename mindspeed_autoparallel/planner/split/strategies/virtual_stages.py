"""Rows of layers cut into virtual stages: local search for plans and cuts over layer counts for the bound, in turns.

Whole-layer optima under the known cuts are starting points of further local search. A step of very many microbatches
repeats the steady state of a shorter one, so it is searched with fewer, then simulated and bounded whole.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

from mindspeed_autoparallel.planner.split.bounds.rank_mixture import RankMixture
from mindspeed_autoparallel.planner.split.bounds.relaxation import cut_of, relaxed_cuts
from mindspeed_autoparallel.planner.split.bounds.whole_layers import Answer, Queries, query
from mindspeed_autoparallel.planner.split.bounds.whole_ranks import ranks_reach, whole_ranks_bound
from mindspeed_autoparallel.planner.split.heuristics.baselines import is_plan
from mindspeed_autoparallel.planner.split.heuristics.candidates import Evaluator, OutOfTime
from mindspeed_autoparallel.planner.split.heuristics.local_search import LocalSearch
from mindspeed_autoparallel.planner.split.heuristics.target_search import TargetSearch
from mindspeed_autoparallel.planner.split.model.cut_model import whole_counts
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.integer_master import IntegerMaster
from mindspeed_autoparallel.planner.split.model.layer_row import is_one_row
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.solution import fits
from mindspeed_autoparallel.planner.split.settings import SETTINGS
from mindspeed_autoparallel.planner.split.state import State


def search_row(state: State, deadline: float) -> bool:
    """Improve plan and bound over cuts of the row of layers until ``deadline``.

    Return whether cuts over layer counts are exhausted, so that only transients and the order of modules can close the
    gap. Raises ``InfeasiblePlan`` if that is proved.
    """
    search = _Solve(state, deadline)
    try:
        search.run()
    except OutOfTime:
        search.take_over()
    state.cuts = tuple(search.evaluator.cuts)
    return search.exhausted


class _Solve:
    def __init__(self, state: State, deadline: float) -> None:
        self.state, self.problem, self.deadline, self.effort = state, state.problem, deadline, state.limits.most_effort
        self.evaluator = Evaluator(state.problem, deadline)
        begun = time.monotonic()
        self.relaxed_until = begun + SETTINGS.virtual_relaxed_share * (deadline - begun)
        self.search_until = begun + SETTINGS.virtual_search_share * (deadline - begun)
        self.tight_until = begun + SETTINGS.virtual_tight_search_share * (deadline - begun)
        self.search = LocalSearch(self.evaluator, self.search_until, state.limits.seed, deadline)
        self.exhausted = False
        self.cuts: dict[Cut, None] = {}
        """Cuts of the relaxations and of whole-layer plans. Those of the local search are tight near its plans only and
        make no query below them easier."""

    def run(self) -> None:
        """Run the relaxation, the local search, mixtures of whole ranks, the relaxation below the plan found, then
        queries on whole layers."""
        state, begin = self.state, self.state.begin
        known = begin.cuts if begin is not None else ()
        rounds = SETTINGS.relaxation_most_rounds
        if self.effort <= SETTINGS.virtual_little_effort:
            rounds = SETTINGS.virtual_rounds_again if known else SETTINGS.virtual_few_rounds
        relaxed = relaxed_cuts(self.problem, self.relaxed_until, state.limits.below, known, rounds)
        if relaxed is None:
            raise state.infeasible()
        self._learn(relaxed)
        if state.closed:
            return
        if self._started() and self._is_promising:
            self._improve()
            self.take_over()
        if not state.closed and self.effort > SETTINGS.virtual_little_effort:
            if self._is_promising:
                self._mix_whole_ranks()
            if not state.closed and time.monotonic() < self.deadline:
                self._relax_again()
            if self._is_promising and not state.closed:
                self._search_whole_layers()

    def _improve(self) -> None:
        """Search for a faster placement than those of the first descents."""
        bound, have_ended = self.state.lower_bound, not self.search.is_late
        # Queries on whole layers raise the bound less where ranks recompute, so the search has more of the time.
        self.search.deadline = self.tight_until if self._recomputes else self.search_until
        # In little time, perturbations gain more.
        if self._recomputes and self._has_many_stages and have_ended:
            left = self.effort - self.evaluator.num_simulated / SETTINGS.effort_replays
            if left > 0:
                TargetSearch(self.search).run(left * SETTINGS.effort_moves, bound)
        else:
            most = min(SETTINGS.virtual_most_simulated, self.effort * SETTINGS.effort_replays)
            self.search.improve(int(most), bound)

    def _relax_again(self) -> None:
        """Raise the bound of plans faster than the best one, by whole layers per rank and the known cuts."""
        state, limit = self.state, self.state.limit
        if limit == inf:
            return
        if not ranks_reach(self.problem, limit - 1):
            state.raise_bound(limit)
            return
        state.raise_bound(whole_ranks_bound(self.problem, state.lower_bound, limit - 1))
        again = relaxed_cuts(self.problem, self.deadline, limit, tuple(self.cuts))
        if again is None:
            state.raise_bound(limit)
        else:
            self._learn((again[0], min(again[1], limit)))

    def _mix_whole_ranks(self) -> None:
        """Raise the bound by mixtures of what ranks may hold."""
        state, most = self.state, self.effort * SETTINGS.effort_programs
        if state.limit == inf or not is_one_row(self.problem):
            return
        if self.problem.num_chunks < SETTINGS.ranks_mixture_chunks and not self._recomputes:
            return
        mixture, queries = RankMixture(self.problem, self.evaluator.simulator), Queries(self.problem, inf)
        begun = time.monotonic()
        until = begun + SETTINGS.ranks_mixture_time * (self.deadline - begun)
        # Queries on whole layers do better near the plan.
        far = 1 - SETTINGS.ranks_mixture_gap
        while state.lower_bound < far * state.limit and queries.are_worthwhile and time.monotonic() < until:
            target = queries.between(state.lower_bound, int(state.limit))
            bound = mixture.bound(state.lower_bound, target, until, most - mixture.programs)
            if bound is None or mixture.programs >= most:
                return
            state.raise_bound(bound)
            queries.take(Answer("none below" if bound >= target else "feasible", bound))

    def _started(self) -> bool:
        """Start the local search. Return whether it found a placement that fits."""
        begin, below = self.state.begin, self.state.limits.below
        if begin is not None and begin.placement is not None:
            self.search.add([self.evaluator.row.ends_of(begin.placement)])
        hopeless = inf if below is None else below * (1 + SETTINGS.virtual_hopeless_split)
        return self.search.best is not None or self.search.start(hopeless)

    @property
    def _recomputes(self) -> bool:
        """Return whether the fastest placement recomputes layers."""
        return self.search.best is not None and bool(self.search.best.one.extra.any())

    @property
    def _has_many_stages(self) -> bool:
        """Return whether there are so many virtual stages that a single move seldom shortens the longest path."""
        return self.problem.num_virtual >= SETTINGS.target_least_virtual

    @property
    def _is_promising(self) -> bool:
        """Return whether the first placements are near the step time to undercut."""
        found, below = self.search.best, self.state.limits.below
        return below is None or (found is not None and found.step <= below * (1 + SETTINGS.virtual_hopeless))

    def _learn(self, relaxed: tuple[dict[Cut, None], float]) -> None:
        self.state.raise_bound(relaxed[1])
        self.evaluator.know(relaxed[0])
        self.cuts.update(relaxed[0])

    def take_over(self) -> None:
        """Keep the local search's plan if it is better."""
        found = self.search.best
        if found is not None and found.step < self.state.limit:
            self.state.offer(self.evaluator.placement(found.one), found.step)

    def _search_whole_layers(self) -> None:
        """Improve bound and plan by queries on whole layers under the known cuts."""
        queries = Queries(self.problem, min(SETTINGS.virtual_most_nodes, self.effort * SETTINGS.effort_nodes))
        state = self.state
        while not state.closed and queries.are_worthwhile and time.monotonic() < self.deadline:
            target = None if state.limit == inf else queries.between(state.lower_bound, int(state.limit))
            state.rounds += 1
            answer = query(self.problem, self.cuts, target, self.deadline, queries.nodes)
            if answer.status == "none below" and target is None:
                # Nothing fits even without transients, which memory rows leave out.
                raise state.infeasible()
            state.raise_bound(answer.bound)
            if answer.values is not None:
                before = len(self.cuts), state.step_time
                self._go_on_from(answer.values)
                if answer.status == "optimal" and (len(self.cuts), state.step_time) == before:
                    self.exhausted = True
                    return
            queries.take(answer)

    def _go_on_from(self, values: list[list[list[float]]]) -> None:
        """Simulate the counts found and search around them."""
        placement = whole_counts(values)
        for point in (values, placement):
            cut, step = cut_of(self.problem, point)
            self.evaluator.know([cut])
            self.cuts[cut] = None
        # The program ignores which layers of a stack are recomputed first, so check the placement.
        if fits(self.problem, placement) and is_plan(self.problem, placement):
            self.state.offer(placement, step)
        ends = self.evaluator.row.ends_of(placement)
        if self.evaluator.row.is_cut(ends[None])[0]:
            self.search.deadline = self.deadline
            self.search.add([ends])
            self.take_over()


def with_fewer_microbatches(problem: SplitProblem) -> SplitProblem | None:
    """Return the problem with fewer microbatches; ``None`` if it has few enough, or cannot have fewer."""
    per_microbatch = 2 * problem.num_virtual
    if problem.num_microbatches * per_microbatch <= SETTINGS.long_step_many:
        return None
    group = problem.microbatch_group_size or problem.num_stages
    groups = SETTINGS.long_step_fewer // per_microbatch // group
    fewer = groups * group + problem.num_microbatches % group
    return replace(problem, num_microbatches=fewer) if groups > 2 * problem.num_chunks else None


def search_long_step(state: State) -> None:
    """Find a plan with fewer microbatches, then simulate and bound it with all of them."""
    problem, limits = state.problem, state.limits
    shorter = with_fewer_microbatches(problem)
    if shorter is None:
        return
    deadline = limits.after(SETTINGS.solve_long_step_share)
    short = State(problem=shorter, limits=limits)
    search_row(short, limits.after(SETTINGS.solve_long_step_share * SETTINGS.long_step_searched))
    if short.placement is None:
        return
    # Sorting so many events takes seconds, even after the time limit, so only two plans are simulated.
    cut, length = cut_of(problem, short.placement)
    state.offer(short.placement, length)
    state.done = True
    relaxed = relaxed_cuts(problem, deadline, known=(cut,), most_rounds=1)
    if relaxed is None:
        return
    state.raise_bound(whole_ranks_bound(problem, min(relaxed[1], state.step_time), state.step_time))
    master = IntegerMaster(problem, state.lower_bound)
    for known in relaxed[0]:
        master.add(known)
    left = max(1.0, deadline - time.monotonic())
    status, bound, placements = master.solve(left, limits.seed, state.placement, state.step_time, limits.effort)
    state.raise_bound(state.step_time if status == "infeasible" else min(bound, state.step_time))
    for other in placements[-1:]:
        state.offer(other, cut_of(problem, other)[1])
