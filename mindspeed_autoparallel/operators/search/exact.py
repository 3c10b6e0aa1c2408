"""The least total cost of one cut: a linear program, and a mixed-integer one if its optimum is fractional."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.operators.search.pricing import parameter_bytes, plan_resident_bytes
from mindspeed_autoparallel.operators.search.problem import CutProblem
from mindspeed_autoparallel.operators.search.state import Decisions


@dataclass(frozen=True)
class Limits:
    """Memory limits of one device, in bytes: weights, and weights with states and kept outputs; None: no limit."""

    parameter_bytes: float | None = None
    memory_bytes: float | None = None

    def times(self, factor: int) -> Limits:
        limits = (self.parameter_bytes, self.memory_bytes)
        return Limits(*(None if limit is None else float(limit * factor) for limit in limits))

    def allow(self, decisions: Decisions, num_microbatches: int) -> bool:
        """Return whether a whole plan stays within the limits."""
        if self.memory_bytes is not None and plan_resident_bytes(decisions, num_microbatches) > self.memory_bytes:
            return False
        return self.parameter_bytes is None or parameter_bytes(decisions) <= self.parameter_bytes

    def rows(self, problem: CutProblem) -> list[tuple[list[numpy.ndarray], float, str]]:
        """Return, per limit that is set, the bytes of each choice of ``problem``, the limit, and its name."""
        found = (
            (problem.parameter_bytes, self.parameter_bytes, "parameters"),
            (problem.resident_bytes, self.memory_bytes, "parameters, their states and kept outputs"),
        )
        return [(held, limit, name) for held, limit, name in found if limit is not None]


def solve_exact(problem: CutProblem, limits: Limits | None = None) -> list[int]:
    """Return the picks of least cost within ``limits``.

    The model has one-hot variables per operator. Per reader of a tensor it has one variable for each pair of made and
    needed placements; their sums are the one-hots (the local polytope). One more per pair is paid once if any reader
    has it. Raises ``InfeasiblePlan`` if a limit cannot be met.
    """
    limits = limits or Limits()
    picks = _solve(problem, limits, integer=False)
    if picks is None:
        picks = _solve(problem, limits, integer=True)
    assert picks is not None, "an integer solve returned a fractional point"
    return picks


@contextlib.contextmanager
def _without_banner() -> Iterator[None]:
    """Keep stdout for results: HiGHS prints a banner on file descriptor 1 regardless of its options."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _solve(problem: CutProblem, limits: Limits, *, integer: bool) -> list[int] | None:
    from ortools.linear_solver.python import model_builder

    model = model_builder.Model()
    make = model.new_bool_var if integer else lambda name: model.new_num_var(0.0, 1.0, name)
    ones = [[make("") for _ in choices] for choices in problem.choices]
    terms, weights = [], []
    for v, variables in enumerate(ones):
        model.add(sum(variables) == 1)
        terms += variables
        weights += [float(c) for c in problem.node_us[v]]
    for read in problem.reads:
        cost = read.cost_us
        if not cost.any() or (len(read.readers) == 1 and cost.min() == cost.max()):
            continue
        shape = [(p, w) for p in range(cost.shape[0]) for w in range(cost.shape[1])]
        # Paid once for any number of readers with the same need.
        paid = {pair: model.new_num_var(0.0, 1.0, "") for pair in shape}
        for v, wants in read.readers:
            if v == read.producer:
                for p, want in enumerate(wants):
                    model.add(paid[p, want] >= ones[v][p])
                continue
            reached = sorted(set(wants))
            alone = len(read.readers) == 1
            pairs = {(p, w): paid[p, w] if alone else model.new_num_var(0.0, 1.0, "") for p, w in shape if w in reached}
            for p, x in enumerate(ones[read.producer]):
                model.add(sum(pairs[p, w] for w in reached) == x)
            for w in reached:
                chosen = sum(y for y, want in zip(ones[v], wants, strict=True) if want == w)
                model.add(sum(pairs[p, w] for p in range(cost.shape[0])) == chosen)
            if not alone:
                for pair, variable in pairs.items():
                    model.add(paid[pair] >= variable)
        terms += list(paid.values())
        weights += [float(cost[pair]) for pair in shape]
    for held, limit, _ in limits.rows(problem):
        unit = max((float(h.max()) for h in held), default=1.0) or 1.0
        shares = [share for xs, hs in zip(ones, held, strict=True) for share in zip(xs, hs / unit, strict=True)]
        model.add(sum(x * float(share) for x, share in shares if share) <= limit / unit)
    model.minimize(model_builder.LinearExpr.weighted_sum(terms, weights))
    solver = model_builder.Solver("highs")
    with _without_banner():
        status = solver.solve(model)
    if status != model_builder.SolveStatus.OPTIMAL:
        told = [(name, limit, sum(float(h.min()) for h in held)) for held, limit, name in limits.rows(problem)]
        name, limit, least = max(told, key=lambda row: row[2] / row[1], default=("parameters", 0.0, 0.0))
        raise InfeasiblePlan(
            f"no plan of this cut keeps the {name} within {limit:.0f} bytes per device: cutting all of them "
            f"leaves {least:.0f} bytes. Raise the limit or the number of devices."
        )
    values = [numpy.array([solver.value(x) for x in xs]) for xs in ones]
    if any(value.max() < 1 - 1e-6 for value in values):
        return None
    return [int(value.argmax()) for value in values]
