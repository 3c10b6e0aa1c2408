"""What a whole plan costs by the search's own model: all mesh dims at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_autoparallel.operators.search.problem import Machine, work_us
from mindspeed_autoparallel.operators.strategies import OperatorPlan


@dataclass(frozen=True)
class PlanCost:
    """Of one device, forward and backward of the whole batch; ``parameter_bytes``: weights it holds."""

    compute_us: float
    communication_us: float
    sent_bytes: int
    parameter_bytes: int

    @property
    def total_us(self) -> float:
        return self.compute_us + self.communication_us

    def as_json(self) -> dict[str, float]:
        return {
            "compute_us": self.compute_us,
            "communication_us": self.communication_us,
            "total_us": self.total_us,
            "sent_bytes": self.sent_bytes,
            "parameter_bytes": self.parameter_bytes,
        }


def plan_cost(plan: OperatorPlan, machine: Machine | None = None) -> PlanCost:
    """Compute and redistribution of ``plan``; nothing overlaps."""
    machine = machine or Machine()
    made = plan.decisions
    compute, held = 0.0, 0
    for name, node in made.graph.nodes.items():
        parts = math.prod(count for _, count in made.cuts(name))
        compute += work_us(node, machine) / parts
        held += node.output_bytes // parts if node.is_parameter else 0
    sent = sum(forward + backward for forward, backward in plan.edge_bytes().values())
    return PlanCost(compute, sent / machine.link_bytes_per_us, sent, held)
