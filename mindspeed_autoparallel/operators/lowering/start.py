"""The derived uniform plan as a second start of the exact search, so that it is never the cheaper of the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.operators.lowering.megatron import derive_megatron
from mindspeed_autoparallel.operators.search.problem import Machine
from mindspeed_autoparallel.operators.search.rounds import LEAST_GAIN, improve
from mindspeed_autoparallel.operators.search.state import Decisions
from mindspeed_autoparallel.operators.strategies import OperatorPlan


def improve_from_uniform(
    decisions: Decisions,
    machine: Machine,
    pins: Sequence[Mapping[str, int]],
    *,
    tied: bool,
    parameter_limit_bytes: float | None = None,
) -> Decisions:
    """``decisions`` improved cut by cut, going on from the uniform plan derived from them while that is cheaper.

    A uniform plan that breaks a pin or the limit is no start.
    """
    while True:
        decisions = improve(decisions, machine, pins, tied=tied, parameter_limit_bytes=parameter_limit_bytes)
        try:
            derived = derive_megatron(OperatorPlan(decisions, "exact", (), 0.0), machine=machine)
        except InfeasiblePlan:
            return decisions
        uniform, cost = derived.uniform.decisions, derived.uniform_cost
        kept = all(uniform.choices[name][dim] == axis for dim, fixed in enumerate(pins) for name, axis in fixed.items())
        fits = parameter_limit_bytes is None or cost.parameter_bytes <= parameter_limit_bytes
        if not (kept and fits and derived.extra_us < -LEAST_GAIN * cost.total_us):
            return decisions
        decisions = uniform
