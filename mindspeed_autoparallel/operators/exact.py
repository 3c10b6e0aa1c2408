"""The exact mode: every cut solved to its optimum, then all cuts together, with a bound on the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.operators.config import SearchOptions
from mindspeed_autoparallel.operators.costs import plan_cost
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.lowering.megatron import derive_megatron
from mindspeed_autoparallel.operators.plan import Bound, OperatorPlan
from mindspeed_autoparallel.operators.search.exact import Limits, solve_exact
from mindspeed_autoparallel.operators.search.pricing import plan_resident_bytes
from mindspeed_autoparallel.operators.search.problem import CutProblem, build_problem, cut_by_cut
from mindspeed_autoparallel.operators.search.prove import prove
from mindspeed_autoparallel.operators.search.state import Decisions

_MOST_UNTIED = 400
"""Nodes of the largest graph for which the default search also cuts repeated layers differently."""
_MOST_DIMS = 4
"""Mesh dims above which plans of coarser meshes are also tried if a gap remains."""
_ALIKE = "plans that cut repeated layers alike"
LEAST_GAIN = 1e-6
"""Relative difference of cost below which another plan does not count as cheaper."""
_MOST_ROUNDS = 4


class ExactSearch:
    """A search of ``graph`` on ``mesh`` with the options ``asked``; ``fixed``: per mesh dim the axis of every pinned
    operator."""

    def __init__(
        self, graph: Graph, mesh: tuple[int, ...], asked: SearchOptions, fixed: Sequence[dict[str, int]]
    ) -> None:
        self.graph, self.mesh, self.asked, self.fixed = graph, mesh, asked, fixed

    def run(self) -> tuple[Decisions, Bound | None, list[str]]:
        """Return the decisions, their bound, and notes.

        If the cheapest plan does not fit into the memory of a device, every cut is solved again with that limit. The
        resulting plan keeps the bound that was proved without the limit.
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
                    f"the cheapest plan needs {_gib(needed)} per device and {_gib(limit)} are available: this one "
                    f"needs {_gib(left)}."
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
        decisions = self._improved_from_uniform(self._cut_by_cut(limits, tied), limits, tied)
        if tied and self.asked.tied is None and small:
            decisions, tied = self._improved(decisions, limits, tied=False), False
        if not with_proof or limits.parameter_bytes is not None:
            return decisions, None
        return self._proved(decisions, tied)

    def _cut_by_cut(self, limits: Limits, tied: bool) -> Decisions:
        def pick(dim: int, problem: CutProblem) -> list[int]:
            # A limit holds after all cuts: this one may leave as much as the later cuts can still divide.
            return solve_exact(problem, limits.times(math.prod(self.mesh[dim + 1 :])))

        number = self.asked.num_microbatches
        return cut_by_cut(
            self.graph, self.mesh, self.fixed, self.asked.machine, pick, tied=tied, num_microbatches=number
        )

    def _improved_from_uniform(self, decisions: Decisions, limits: Limits, tied: bool) -> Decisions:
        """Improve ``decisions`` cut by cut, and restart from the uniform plan derived from them while that is cheaper.

        A uniform plan that breaks a pin or a limit is not used as a start.
        """
        while True:
            decisions = self._improved(decisions, limits, tied)
            try:
                derived = derive_megatron(OperatorPlan(decisions, "exact", (), 0.0), machine=self.asked.machine)
            except InfeasiblePlan:
                return decisions
            uniform, cost = derived.uniform.decisions, derived.uniform_cost
            kept = all(
                uniform.choices[name][dim] == axis for dim, pins in enumerate(self.fixed) for name, axis in pins.items()
            )
            fits = limits.allow(uniform, self.asked.num_microbatches)
            if not (kept and fits and derived.extra_us < -LEAST_GAIN * cost.total_us):
                return decisions
            decisions = uniform

    def _improved(self, decisions: Decisions, limits: Limits, tied: bool) -> Decisions:
        """Solve one cut at a time, with the others fixed, until none improves or the limit of rounds is reached."""
        unchanged = 0
        for turn in range(_MOST_ROUNDS * len(self.mesh)):
            dim = turn % len(self.mesh)
            others, parts = decisions.without(dim), self.mesh[dim]
            number = self.asked.num_microbatches
            problem = build_problem(
                others, parts, self.asked.machine, self.fixed[dim], tied=tied, at=dim, num_microbatches=number
            )
            chosen = {name: made[dim] for name, made in decisions.choices.items()}
            before = problem.picks(chosen)
            # Operators that this problem ties may differ in the current plan, which then has no picks to compare with.
            if problem.spread(before) == chosen:
                after = solve_exact(problem, limits)
                if problem.total_us(after) < problem.total_us(before) * (1 - LEAST_GAIN):
                    decisions, unchanged = others.insert(dim, parts, problem.spread(after)), 0
                    continue
            unchanged += 1
            if unchanged == len(self.mesh):
                break
        return decisions

    def _cost(self, decisions: Decisions) -> float:
        return plan_cost(OperatorPlan(decisions, "exact", (), 0.0), self.asked.machine).total_us

    def _proved(self, decisions: Decisions, tied: bool) -> tuple[Decisions, Bound | None]:
        """Solve all cuts together if the problem is small enough; a proof over tied plans covers no others."""
        proof = prove(decisions, self._cost(decisions), self.asked.machine, self.fixed, tied=tied)
        if proof is None:
            return decisions, None
        scope = _ALIKE if tied else "all plans of this mesh"
        found, cost = proof.decisions, self._cost(proof.decisions)
        if len(self.mesh) > _MOST_DIMS and cost > proof.bound_us * (1 + LEAST_GAIN):
            found = min(found, *self._from_coarser(tied), key=self._cost)
            cost = self._cost(found)
        return found, Bound(cost, min(cost, proof.bound_us), scope, proof.method)

    def _from_coarser(self, tied: bool) -> list[Decisions]:
        """Return the cheapest plan of meshes of two or three larger dims, improved on this mesh.

        Empty if pins forbid all these meshes.
        """
        number = len(self.mesh)
        starts = []
        for at in ((number // 3, number - number // 3), (1, number // 2), (number // 2,)):
            groups = [slice(a, b) for a, b in itertools.pairwise((0, *at, number))]
            if all(pins == self.fixed[g.start] for g in groups for pins in self.fixed[g]):
                starts.append(self._on_coarser(groups, tied))
        if not starts:
            return []
        return [self._improved(min(starts, key=self._cost), Limits(), tied)]

    def _on_coarser(self, groups: list[slice], tied: bool) -> Decisions:
        """Solve the mesh in which each of ``groups`` is one dim; every dim of a group then makes the same cut."""
        mesh = tuple(math.prod(self.mesh[group]) for group in groups)
        coarse = ExactSearch(self.graph, mesh, self.asked, [self.fixed[group.start] for group in groups])
        decisions = coarse._cut_by_cut(Limits(), tied)
        proof = prove(decisions, coarse._cost(decisions), self.asked.machine, coarse.fixed, tied=tied)
        made = (decisions if proof is None else proof.decisions).choices
        lengths = [len(self.mesh[group]) for group in groups]
        choices = {
            name: tuple(axis for axis, length in zip(axes, lengths, strict=True) for _ in range(length))
            for name, axes in made.items()
        }
        return Decisions(self.graph, self.mesh, choices)


def _gib(bytes_: float) -> str:
    return f"{bytes_ / 2**30:.1f} GiB"
