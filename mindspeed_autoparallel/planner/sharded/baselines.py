"""Baselines of a sharded plan: the shipped configuration, the same without recomputation, and a greedy choice."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.pricing import layer_policies, outcome_of, policies_by_pattern, priced
from mindspeed_autoparallel.planner.sharded.problem import Problem, Unmeasured
from mindspeed_autoparallel.schedule.sharded import replay
from mindspeed_autoparallel.spec.sharded import EACH, RECOMPUTE, ShardedDecisions
from mindspeed_autoparallel.spec.sharded_plan import ShardedOutcome


def baselines_of(problem: Problem, shipped: ShardedDecisions, limit_bytes: int) -> tuple[ShardedOutcome, ...]:
    """Return the baselines for which the profile has costs."""
    try:
        outcomes = [priced(problem, shipped, limit_bytes, "shipped")]
    except Unmeasured:
        return ()
    bare = replace(shipped, policies={})
    outcomes.append(priced(problem, bare, limit_bytes, "without recomputation"))
    if problem.host.layer_choice == EACH:
        outcomes.append(_greedy(problem, bare, limit_bytes))
    return tuple(outcomes)


def _greedy(problem: Problem, bare: ShardedDecisions, limit_bytes: int) -> ShardedOutcome:
    """Return the shipped sizes with the fewest layers recomputed that fit, counted from the last layer on."""
    lowering = Lowering(problem, bare)
    layers = [module.name for module in problem.profile.modules if module.is_layer and module.needs_backward]
    policies: dict[str, str] = {}
    replayed = replay(lowering.training(policies))
    while replayed.peak_bytes > limit_bytes and layers:
        policies[layers.pop()] = RECOMPUTE
        replayed = replay(lowering.training(policies))
    chosen = replace(bare, policies=policies_by_pattern(problem, policies))
    note = f"{len(layer_policies(problem, chosen))} layers recomputed, from the last one on"
    return outcome_of(lowering, chosen, replayed, limit_bytes, "greedy", note)
