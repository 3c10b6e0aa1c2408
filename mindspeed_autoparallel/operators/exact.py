"""The exact mode: every cut solved to its optimum, then all cuts together, with what is proved of the result."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.operators.costs import plan_cost
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.lowering.start import improve_from_uniform
from mindspeed_autoparallel.operators.options import SearchOptions
from mindspeed_autoparallel.operators.plan import Bound, OperatorPlan
from mindspeed_autoparallel.operators.search.exact import Limits, solve_exact
from mindspeed_autoparallel.operators.search.pricing import plan_resident_bytes
from mindspeed_autoparallel.operators.search.problem import build_problem
from mindspeed_autoparallel.operators.search.prove import prove
from mindspeed_autoparallel.operators.search.rounds import improve
from mindspeed_autoparallel.operators.search.state import Decisions

_MOST_UNTIED = 400
"""Operators up to which plans that cut repeated layers differently are searched without being asked for."""
_ALIKE = "plans that cut repeated layers alike"


class ExactSearch:
    """Search ``graph`` on ``mesh`` as ``asked``; ``fixed``: per mesh dim the axis of every pinned operator."""

    def __init__(
        self, graph: Graph, mesh: tuple[int, ...], asked: SearchOptions, fixed: Sequence[dict[str, int]]
    ) -> None:
        self.graph, self.mesh, self.asked, self.fixed = graph, mesh, asked, fixed

    def run(self) -> tuple[Decisions, Bound | None, list[str]]:
        """Give the decisions, their bound, and notes.

        The memory of a device is looked at when the cheapest plan does not fit it: then every cut is solved again with
        it. A plan that fits by that has no bound beside the one without memory.
        """
        given = Limits(self.asked.parameter_limit_bytes, None)
        decisions, bound = self._search(given)
        limit, notes = self.asked.memory_limit_bytes, []
        needed = plan_resident_bytes(decisions, self.asked.num_microbatches)
        if limit is not None and needed > limit:
            try:
                fitting, _ = self._search(Limits(self.asked.parameter_limit_bytes, limit), with_proof=False)
            except InfeasiblePlan:
                fitting = decisions
            left = plan_resident_bytes(fitting, self.asked.num_microbatches)
            if left <= limit:
                decisions = fitting
                notes.append(
                    f"the cheapest plan needs {_gib(needed)} per device and {_gib(limit)} are there: this one needs "
                    f"{_gib(left)}."
                )
                if bound:
                    cost = self._cost(decisions)
                    bound = Bound(cost, min(bound.bound_us, cost), f"{bound.scope}, memory aside", bound.method)
            else:
                notes.append(
                    f"no plan was found that fits {_gib(limit)} per device: this one needs {_gib(needed)} for weights, "
                    "their states and the outputs kept for backward. Give more devices, more microbatches or a smaller "
                    "batch, or compute outputs again."
                )
        return decisions, bound, notes

    def _search(self, limits: Limits, *, with_proof: bool = True) -> tuple[Decisions, Bound | None]:
        tied = self.asked.tied is not False
        small = len(self.graph.nodes) <= _MOST_UNTIED
        decisions = self._cut_by_cut(limits, tied)
        machine, number = self.asked.machine, self.asked.num_microbatches
        decisions = improve_from_uniform(
            decisions, machine, self.fixed, tied=tied, limits=limits, num_microbatches=number
        )
        if tied and self.asked.tied is None and small:
            decisions = improve(decisions, machine, self.fixed, tied=False, limits=limits, num_microbatches=number)
            tied = False
        if not with_proof or limits.parameter_bytes is not None:
            return decisions, None
        return self._proved(decisions, tied)

    def _cut_by_cut(self, limits: Limits, tied: bool) -> Decisions:
        decisions = Decisions(self.graph, (), dict.fromkeys(self.graph.nodes, ()))
        for dim, parts in enumerate(self.mesh):
            problem = build_problem(
                decisions,
                parts,
                self.asked.machine,
                self.fixed[dim],
                tied=tied,
                num_microbatches=self.asked.num_microbatches,
            )
            # A limit holds after all cuts: this one may leave as much as the cuts to come can still divide.
            later = limits.times(math.prod(self.mesh[dim + 1 :]))
            decisions = decisions.extend(parts, problem.spread(solve_exact(problem, later)))
        return decisions

    def _cost(self, decisions: Decisions) -> float:
        return plan_cost(OperatorPlan(decisions, "exact", (), 0.0), self.asked.machine).total_us

    def _proved(self, decisions: Decisions, tied: bool) -> tuple[Decisions, Bound | None]:
        """Solve all cuts together where that can be stated; a proof of tied plans does not speak of others."""
        proof = prove(decisions, self._cost(decisions), self.asked.machine, self.fixed, tied=tied)
        if proof is None:
            return decisions, None
        scope = _ALIKE if tied else "all plans of this mesh"
        cost = self._cost(proof.decisions)
        return proof.decisions, Bound(cost, min(cost, proof.bound_us), scope, proof.method)


def _gib(bytes_: float) -> str:
    return f"{bytes_ / 2**30:.1f} GiB"
