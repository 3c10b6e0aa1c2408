"""Prices of decisions: the replayed step and peak as records that plans and pages show."""

from __future__ import annotations

from mindspeed_autoparallel.planner.sharded.buckets import lowering_of
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.schedule.sharded import Replayed, replay
from mindspeed_autoparallel.schedule.sharded.queues import ALL_REDUCE, COMPUTE, GATHER, HOST, REDUCE
from mindspeed_autoparallel.spec.sharded import KEEP, ShardedDecisions
from mindspeed_autoparallel.spec.sharded_plan import ShardedMemory, ShardedOutcome, ShardedStep


def layer_policies(problem: Problem, decisions: ShardedDecisions) -> dict[str, str]:
    """Return policies by layer name, without the layers that keep everything."""
    found = {}
    for module in problem.profile.modules:
        if module.is_layer:
            policy = decisions.policy(module.pattern, problem.numbers[module.name])
            if policy != KEEP:
                found[module.name] = policy
    return found


def policies_by_pattern(problem: Problem, policies: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Return policies in the form of ``ShardedDecisions``, without patterns whose layers all keep everything."""
    rows: dict[str, list[str]] = {}
    for module in problem.profile.modules:
        if module.is_layer:
            rows.setdefault(module.pattern, []).append(policies.get(module.name, KEEP))
    return {pattern: tuple(row) for pattern, row in rows.items() if set(row) != {KEEP}}


def priced(
    problem: Problem, decisions: ShardedDecisions, limit_bytes: int, name: str = "", note: str = ""
) -> ShardedOutcome:
    """Return ``decisions`` with their step time and peak. Raises ``Unmeasured`` if the profile lacks such costs."""
    lowering = lowering_of(problem, decisions)
    replayed = replay(lowering.training(layer_policies(problem, decisions)))
    return outcome_of(lowering, decisions, replayed, limit_bytes, name, note)


def outcome_of(
    lowering: Lowering, decisions: ShardedDecisions, replayed: Replayed, limit_bytes: int, name: str, note: str = ""
) -> ShardedOutcome:
    busy = {queue: duration / 1000 for queue, duration in replayed.busy_ns.items()}
    exchange = sum(
        lowering.exchanges.forward_us(lowering.costs[module.kind]) * (2 if module.needs_backward else 1)
        for module in lowering.profile.modules
    )
    step = ShardedStep(
        total_us=replayed.step_ns / 1000,
        compute_us=busy[COMPUTE] - lowering.optimizer_ns / 1000,
        recompute_us=replayed.recompute_ns / 1000,
        exchange_us=exchange * decisions.sizes.accumulation,
        gather_us=busy[GATHER],
        reduce_us=busy[REDUCE] + busy[ALL_REDUCE],
        host_copy_us=busy[HOST],
        exposed_us=replayed.step_ns / 1000 - busy[COMPUTE],
        optimizer_us=lowering.optimizer_ns / 1000,
    )
    memory = ShardedMemory(
        peak_bytes=replayed.peak_bytes,
        limit_bytes=limit_bytes,
        peak_point=replayed.peak_point,
        terms={term: size for term, size in replayed.peak_terms.items() if size},
    )
    return ShardedOutcome(
        name=name, decisions=decisions, step=step, memory=memory, feasible=replayed.peak_bytes <= limit_bytes, note=note
    )
