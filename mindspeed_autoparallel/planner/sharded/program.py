"""The integer program of the layers' policies: the fastest choice that all cuts found so far allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ortools.sat.python import cp_model

from mindspeed_autoparallel.schedule.sharded import Replayed
from mindspeed_autoparallel.spec.sharded import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_KEEP_ATTENTION, RECOMPUTE_OFFLOAD

Options = Mapping[str, tuple[str, ...]]
"""Policies to choose from, by layer."""


@dataclass(frozen=True)
class Effort:
    """Limits of one layer search; seconds are the solver's deterministic ones."""

    tolerance: float = 1e-4
    """The search ends at a gap of at most this share."""
    program_s: float = 2.0
    """Limit of one integer program."""
    total_s: float = 20.0
    rounds: int = 40
    alike: bool = False
    """Count layers that no cut distinguishes instead of choosing for each, and exclude no single solution."""


_ORDER = (RECOMPUTE_OFFLOAD, RECOMPUTE, RECOMPUTE_KEEP_ATTENTION, OFFLOAD, KEEP)
THOROUGH = Effort()
QUICK = Effort(tolerance=1e-3, program_s=0.1, total_s=0.3, rounds=10, alike=True)
"""Limits for each of many sizes."""


@dataclass
class Cuts:
    paths: list[tuple[int, dict[tuple[str, str], int]]] = field(default_factory=list)
    """Nanoseconds that do not depend on policies, and nanoseconds added by (layer, policy)."""
    points: list[tuple[int, dict[tuple[str, str], int], tuple[str, str] | None]] = field(default_factory=list)
    """Bytes left for layers, bytes by (layer, policy), and the (layer, policy) under which alone the point exists."""
    known: list[dict[str, str]] = field(default_factory=list)
    """Policies whose replay was slower or larger than the cuts predict."""

    def with_less(self, margin: int) -> Cuts:
        """Return the cuts with ``margin`` bytes less at every point."""
        points = [(left - margin, weights, only) for left, weights, only in self.points]
        return replace(self, points=points)


@dataclass(frozen=True)
class Solved:
    """The best policies found, their replay, and a lower bound of the step time under any policies."""

    policies: dict[str, str]
    replayed: Replayed
    bound_ns: int


@dataclass(frozen=True)
class Answer:
    """Result of one program: ``found``, ``infeasible`` or ``unknown`` (its time ended)."""

    status: str
    policies: dict[str, str] = field(default_factory=dict)
    bound_ns: int = 0
    spent_s: float = 0.0


def _classes(options_of: Options, cuts: Cuts, effort: Effort) -> list[list[str]]:
    """Return classes of layers that no cut distinguishes; if single solutions are excluded, every layer is a class."""
    named = {only[0] for _, _, only in cuts.points if only is not None}
    rows = [weights for _, weights in cuts.paths] + [weights for _, weights, _ in cuts.points]
    classes: dict[object, list[str]] = {}
    for layer, options in options_of.items():
        alone = layer if layer in named or (cuts.known and not effort.alike) else ""
        weights = tuple(row.get((layer, policy), 0) for row in rows for policy in options)
        classes.setdefault((alone, options, weights), []).append(layer)
    return list(classes.values())


def solve_program(options_of: Options, cuts: Cuts, effort: Effort, below_ns: int | None) -> Answer:
    """Return the policies that are fastest by the cuts, below ``below_ns`` if given."""
    model = cp_model.CpModel()
    classes = _classes(options_of, cuts, effort)
    number = {
        (layers[0], policy): model.new_bool_var("") if len(layers) == 1 else model.new_int_var(0, len(layers), "")
        for layers in classes
        for policy in options_of[layers[0]]
    }
    for layers in classes:
        model.add(sum(number[layers[0], policy] for policy in options_of[layers[0]]) == len(layers))
    time = model.new_int_var(0, below_ns - 1 if below_ns else 2**50, "time")
    for fixed, weights in cuts.paths:
        model.add(time >= fixed + sum(weights[key] * count for key, count in number.items() if weights.get(key)))
    for left, weights, only in cuts.points:
        row = model.add(sum(weights[key] * count for key, count in number.items() if weights.get(key)) <= left)
        if only is not None:
            row.only_enforce_if(number[only])
    for policies in cuts.known if not effort.alike else ():
        same = [number[layer, policies.get(layer, KEEP)] for layer in options_of]
        model.add(sum(same) <= len(same) - 1)
    model.minimize(time)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort.program_s
    solver.parameters.relative_gap_limit = effort.tolerance / 2
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(status="infeasible" if status == cp_model.INFEASIBLE else "unknown", spent_s=spent)
    policies = _spread(options_of, classes, number, solver)
    return Answer("found", policies, int(solver.best_objective_bound), spent)


def _spread(
    options_of: Options,
    classes: list[list[str]],
    number: dict[tuple[str, str], cp_model.IntVar],
    solver: cp_model.CpSolver,
) -> dict[str, str]:
    """Return policies by layer; in a class, the policies that hold the least come first."""
    policies: dict[str, str] = {}
    for layers in classes:
        options = sorted(options_of[layers[0]], key=lambda one: _ORDER.index(one))
        row = [policy for policy in options for _ in range(solver.value(number[layers[0], policy]))]
        policies |= {layer: policy for layer, policy in zip(layers, row, strict=True) if policy != KEEP}
    return policies
