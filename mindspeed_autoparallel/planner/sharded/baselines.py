"""Baselines of a sharded plan: the shipped configuration, the same without recomputation, and a greedy choice."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.prefixes import fewest_first
from mindspeed_autoparallel.planner.sharded.pricing import layer_policies, outcome_of, policies_by_pattern, priced
from mindspeed_autoparallel.planner.sharded.problem import Problem, Unmeasured
from mindspeed_autoparallel.schedule.sharded import Replayed, replay
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

    def run(policies: dict[str, str]) -> Replayed:
        return replay(lowering.training(policies))

    replayed, policies = run({}), dict[str, str]()
    if replayed.peak_bytes > limit_bytes and layers:
        found = fewest_first({RECOMPUTE: layers[::-1]}, run, limit_bytes, all_or_none=False)
        everything = dict.fromkeys(layers, RECOMPUTE)
        replayed, policies = found or (run(everything), everything)
    chosen = replace(bare, policies=policies_by_pattern(problem, policies))
    note = f"{len(layer_policies(problem, chosen))} layers recomputed, from the last one on"
    return outcome_of(lowering, chosen, replayed, limit_bytes, "greedy", note)
