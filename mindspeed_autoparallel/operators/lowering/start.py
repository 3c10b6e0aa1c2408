"""The derived uniform plan as a second start of the exact search, so that it is never the cheaper of the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.operators.lowering.megatron import derive_megatron
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.exact import Limits
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.operators.search.rounds import LEAST_GAIN, improve
from mindspeed_autoparallel.operators.search.state import Decisions


def improve_from_uniform(
    decisions: Decisions,
    machine: Machine,
    pins: Sequence[Mapping[str, int]],
    *,
    tied: bool,
    limits: Limits | None = None,
    num_microbatches: int = 1,
) -> Decisions:
    """Improve ``decisions`` cut by cut, going on from the uniform plan derived from them while that is cheaper.

    A uniform plan that breaks a pin or the limit is no start.
    """
    limits = limits or Limits()
    while True:
        decisions = improve(decisions, machine, pins, tied=tied, limits=limits, num_microbatches=num_microbatches)
        try:
            derived = derive_megatron(OperatorPlan(decisions, "exact", (), 0.0), machine=machine)
        except InfeasiblePlan:
            return decisions
        uniform, cost = derived.uniform.decisions, derived.uniform_cost
        kept = all(uniform.choices[name][dim] == axis for dim, fixed in enumerate(pins) for name, axis in fixed.items())
        fits = limits.allow(uniform, num_microbatches)
        if not (kept and fits and derived.extra_us < -LEAST_GAIN * cost.total_us):
            return decisions
        decisions = uniform
