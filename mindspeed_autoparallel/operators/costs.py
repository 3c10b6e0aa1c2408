"""The cost of a whole plan by the search's own model: all mesh dims and pipeline stages at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mindspeed_autoparallel.operators.graph.redistribution import local_bytes
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.pricing import Machine, work_us


@dataclass(frozen=True)
class PlanCost:
    """The cost on one device of the slowest stage, forward and backward of the whole batch.

    ``parameter_bytes``: weights of the stage that holds most; ``bubble_us``: the wait for other stages.
    """

    compute_us: float
    communication_us: float
    sent_bytes: int
    parameter_bytes: int
    bubble_us: float = 0.0

    @property
    def total_us(self) -> float:
        """Return the sum of the parts: the model assumes no overlap."""
        return self.compute_us + self.communication_us + self.bubble_us

    def as_json(self) -> dict[str, float]:
        """Return the parts and their sum as plain data, in microseconds and bytes."""
        return {**vars(self), "total_us": self.total_us}


@dataclass
class _Stage:
    compute_us: float = 0.0
    sent_bytes: int = 0
    parameters: dict[str, int] = field(default_factory=dict)


def plan_cost(plan: OperatorPlan, machine: Machine | None = None) -> PlanCost:
    """Price ``plan``: compute, redistribution and, with stages, the transfers between them and the bubble.

    Stages are consecutive runs of operators with about equal work. A tensor is sent once to each later stage that reads
    it: every device sends its piece forward and gets the gradient back. The bubble is the slowest stage's time times
    (stages - 1) / microbatches, as in a schedule without interleaving.
    """
    machine = machine or Machine()
    made = plan.decisions
    graph = made.graph
    time_us = {
        name: work_us(graph, node, machine) / math.prod(count for _, count in made.cuts(name))
        for name, node in graph.nodes.items()
    }
    stage_of = assign_stages(plan, time_us)
    stages = [_Stage() for _ in range(plan.stages)]
    for name, stage in stage_of.items():
        stages[stage].compute_us += time_us[name]
    moved, crossed = plan.edge_bytes(), set()
    for producer, consumer, slot in graph.edges():
        here = stage_of[consumer.name]
        local = local_bytes(producer.output_bytes, made.output_placements(producer.name), made.mesh)
        stages[here].sent_bytes += sum(moved[producer.name, consumer.name, slot])
        if producer.is_parameter:
            stages[here].parameters[producer.name] = local
        elif producer.inputs and stage_of[producer.name] != here and (producer.name, here) not in crossed:
            crossed.add((producer.name, here))
            stages[stage_of[producer.name]].sent_bytes += local
            stages[here].sent_bytes += local * graph.flows_back(producer.name, consumer.name, slot)
    rate = machine.link_bytes_per_us
    slowest = max(stages, key=lambda stage: stage.compute_us + stage.sent_bytes / rate)
    busy = slowest.compute_us + slowest.sent_bytes / rate
    return PlanCost(
        slowest.compute_us,
        slowest.sent_bytes / rate,
        slowest.sent_bytes,
        max(sum(stage.parameters.values()) for stage in stages),
        busy * (plan.stages - 1) / plan.num_microbatches,
    )


def assign_stages(plan: OperatorPlan, time_us: dict[str, float]) -> dict[str, int]:
    """Map every operator to its stage: consecutive runs of about equal ``time_us``; no operator precedes its inputs."""
    total = sum(time_us.values()) or 1.0
    done = 0.0
    result: dict[str, int] = {}
    for name, node in plan.decisions.graph.nodes.items():
        if node.inputs:
            earliest = max((result[source] for source in node.inputs if source in result), default=0)
            middle = done + time_us[name] / 2
            result[name] = max(earliest, min(plan.stages - 1, int(plan.stages * middle / total)))
            done += time_us[name]
    return result
