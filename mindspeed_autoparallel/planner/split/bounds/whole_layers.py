"""Feasibility queries with whole layers: does any placement take at most a target step time under the known cuts?

A target well below the best plan leaves little room on ranks and at boundaries, so many queries are decided quickly
even if the optimum itself is out of reach. The next target is nearer to the bound after an undecided query, and nearer
to the plan after a proof.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from math import floor, inf

from mindspeed_autoparallel.planner.split.bounds.relaxation import relaxed_cuts
from mindspeed_autoparallel.planner.split.bounds.whole_ranks import ranks_reach
from mindspeed_autoparallel.planner.split.model.cut_model import ROUNDING, CutModel
from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.layer_row import fits_a_row
from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.solution import tick_of
from mindspeed_autoparallel.planner.split.settings import SETTINGS


@dataclass(frozen=True)
class Answer:
    """The answer to a query."""

    status: str
    """``none below`` (proved), ``optimal``, ``feasible`` (a placement meets the target under the cuts), ``unknown``."""
    bound: float
    """Lower bound of the step time of all placements of whole layers, in ticks."""
    values: list[list[list[float]]] | None = None
    """Layers by segment, kind and virtual stage of the fastest placement found; recomputed ones may be fractions."""


def query(problem: SplitProblem, cuts: Collection[Cut], target: int | None, deadline: float, nodes: int) -> Answer:
    """Search for a placement of whole layers that takes at most ``target`` under ``cuts``; ``None``: the fastest one.

    ``nodes``: most nodes of the search.
    """
    if target is not None and not ranks_reach(problem, target):
        return Answer("none below", float(target or 0))
    left = deadline - time.monotonic()
    until = (
        deadline
        if left < SETTINGS.whole_layers_last_seconds
        else deadline - (1 - SETTINGS.whole_layers_round_share) * left
    )
    model = CutModel(problem, whole=True)
    for cut in cuts:
        model.add(cut)
    status, bound = model.solve(until, nodes, None if target is None else target * (1 + 2 * ROUNDING))
    if status == "infeasible":
        return Answer("none below", float(target or 0))
    if status == "unknown":
        return Answer(status, 0.0)
    return Answer(status, bound if target is None else min(bound, target), model.values())


class Queries:
    """The targets of queries, between a bound and a plan."""

    def __init__(self, problem: SplitProblem, most_nodes: float) -> None:
        self._unit, self._most_nodes = tick_of(problem), most_nodes
        self.nodes, self._share = SETTINGS.whole_layers_first_nodes, SETTINGS.whole_layers_first_share

    @property
    def are_worthwhile(self) -> bool:
        """Return whether another query is within the limits."""
        return self.nodes <= self._most_nodes and self._share >= SETTINGS.whole_layers_least_share

    def between(self, low: int, high: int) -> int:
        """Return the next target, in whole ticks above ``low``; ``high`` if the interval is small."""
        if high - low <= max(SETTINGS.whole_layers_few_ticks * self._unit, SETTINGS.whole_layers_nearly * high):
            return high
        return low + max(1, round(self._share * (high - low) / self._unit)) * self._unit

    def take(self, answer: Answer) -> None:
        """Move the next target toward the plan after a proof; otherwise toward the bound, with more nodes."""
        if answer.status == "none below":
            self._share = min(1.0, self._share * SETTINGS.whole_layers_nearer)
        elif answer.status != "optimal":
            self._share, self.nodes = self._share / 2, self.nodes * 2


def raised_bound(problem: SplitProblem, low: float, high: int, deadline: float) -> float:
    """Return a lower bound of the step time between ``low`` and ``high``."""
    if not fits_a_row(problem):
        return low
    relaxed = None
    if ranks_reach(problem, high):
        relaxed = relaxed_cuts(problem, deadline, high, most_rounds=SETTINGS.whole_layers_rounds)
    if relaxed is None or relaxed[1] >= high:
        return high
    low = max(low, relaxed[1])
    queries, bound = Queries(problem, inf), floor(low)
    while bound < high and queries.are_worthwhile and time.monotonic() < deadline:
        answer = query(problem, relaxed[0], queries.between(bound, high), deadline, queries.nodes)
        bound = max(bound, min(high, floor(answer.bound)))
        queries.take(answer)
        if answer.status == "optimal":
            # This optimum is the highest bound that these cuts give.
            break
    return max(low, bound)
