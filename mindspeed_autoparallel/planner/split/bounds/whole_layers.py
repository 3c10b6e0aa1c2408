"""Queries about whole layers: does any placement of them stay below a step under the known cuts?

A step well below the plan known leaves so little room on ranks and at boundaries that many such queries are decided
in moments where the optimum itself is out of reach. The next step is nearer to the bound after a query that was too
hard, and nearer to the plan after one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from math import floor, inf

from mindspeed_autoparallel.planner.split.bounds.relaxation import relaxed_cuts
from mindspeed_autoparallel.planner.split.bounds.whole_ranks import rank_caps
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
    """``none below``, ``optimal``, ``feasible`` (some placement may stay below) or ``unknown``."""
    bound: float
    """No placement of whole layers takes less."""
    values: list[list[list[float]]] | None = None
    """Layers by segment, kind and virtual stage, of the shortest placement met; recomputed ones may be fractions."""


def query(problem: SplitProblem, cuts: Collection[Cut], target: int | None, deadline: float, nodes: int) -> Answer:
    """Look for a placement of whole layers that takes at most ``target`` by the cuts known; ``None``: for the shortest.

    ``nodes``: of the search, at most.
    """
    caps = rank_caps(problem, target) if target is not None else []
    if caps is None:
        return Answer("none below", float(target or 0))
    left = deadline - time.monotonic()
    until = (
        deadline
        if left < SETTINGS.whole_layers_last_seconds
        else deadline - (1 - SETTINGS.whole_layers_round_share) * left
    )
    model = CutModel(problem, whole=True)
    model.cap(caps)
    for cut in cuts:
        model.add(cut)
    status, bound = model.solve(until, nodes, None if target is None else target * (1 + 2 * ROUNDING))
    if status == "infeasible":
        return Answer("none below", float(target or 0))
    if status == "unknown":
        return Answer(status, 0.0)
    return Answer(status, bound if target is None else min(bound, target), model.values())


class Queries:
    """The step times to query, between a bound and a plan."""

    def __init__(self, problem: SplitProblem, most_nodes: float) -> None:
        self._unit, self._most_nodes = tick_of(problem), most_nodes
        self.nodes, self._share = SETTINGS.whole_layers_first_nodes, SETTINGS.whole_layers_first_share

    @property
    def are_worthwhile(self) -> bool:
        """Return whether another query is within the effort."""
        return self.nodes <= self._most_nodes and self._share >= SETTINGS.whole_layers_least_share

    def between(self, low: int, high: int) -> int:
        """Return the step to query, in whole ticks."""
        if high - low <= max(SETTINGS.whole_layers_few_ticks * self._unit, SETTINGS.whole_layers_nearly * high):
            return high
        return low + max(1, round(self._share * (high - low) / self._unit)) * self._unit

    def take(self, answer: Answer) -> None:
        """Go nearer to the plan or to the bound."""
        if answer.status == "none below":
            self._share = min(1.0, self._share * SETTINGS.whole_layers_nearer)
        elif answer.status != "optimal":
            self._share, self.nodes = self._share / 2, self.nodes * 2


def raised_bound(problem: SplitProblem, low: float, high: int, deadline: float) -> float:
    """Return a step that no plan beats, ``low`` or more; it need not exceed ``high``."""
    if not fits_a_row(problem):
        return low
    caps, relaxed = rank_caps(problem, high), None
    if caps is not None:
        relaxed = relaxed_cuts(problem, deadline, high, most_rounds=SETTINGS.whole_layers_rounds, caps=caps)
    if relaxed is None or relaxed[1] >= high:
        return high
    low = max(low, relaxed[1])
    queries, bound = Queries(problem, inf), floor(low)
    while bound < high and queries.are_worthwhile and time.monotonic() < deadline:
        answer = query(problem, relaxed[0], queries.between(bound, high), deadline, queries.nodes)
        bound = max(bound, min(high, floor(answer.bound)))
        queries.take(answer)
        if answer.status == "optimal":
            # These cuts give no higher bound.
            break
    return max(low, bound)
