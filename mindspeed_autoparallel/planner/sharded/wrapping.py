"""Which modules beside the longest stack of layers are units: every choice, at a plan's sizes and policies."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from mindspeed_autoparallel.planner.sharded.pricing import priced
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.spec.sharded import GroupChoice, ShardedDecisions
from mindspeed_autoparallel.spec.sharded_plan import ShardedOutcome

_MOST_PATTERNS = 8
"""256 replays."""


def rewrapped(problem: Problem, best: ShardedOutcome, limit_bytes: int) -> ShardedOutcome | None:
    """Return the fastest choice that fits and is faster than ``best``; ``None`` where there is none."""
    found = None
    for decisions in wrappings(problem, best.decisions):
        outcome = priced(problem, decisions, limit_bytes, best.name)
        if outcome.feasible and outcome.step.total_us < (found or best).step.total_us:
            found = outcome
    return found


def wrappings(problem: Problem, decisions: ShardedDecisions) -> Iterator[ShardedDecisions]:
    """Yield ``decisions`` with every other choice of units but the longest stack of layers.

    Left alone are patterns with parameters that have no gradients, experts that are split, which are units always, and
    the head of a loss in chunks.
    """
    free = _free_patterns(problem, decisions)[:_MOST_PATTERNS]
    order = list(dict.fromkeys(module.pattern for module in problem.profile.modules))
    example = decisions.groups[-1]
    for chosen in itertools.product((True, False), repeat=len(free)):
        wanted = {pattern for pattern, wrapped in zip(free, chosen, strict=True) if wrapped}
        groups = [group for group in decisions.groups if group.pattern not in free or group.pattern in wanted]
        added = wanted - {group.pattern for group in groups}
        if not added and len(groups) == len(decisions.groups):
            continue
        for pattern in sorted(added, key=order.index):
            before = [place for place, one in enumerate(groups) if one.pattern and _stands_before(order, one, pattern)]
            choice = replace(example, pattern=pattern, reshard_after_forward=decisions.groups[0].reshard_after_forward)
            groups.insert(before[-1] + 1 if before else 0, choice)
        if any(group.pattern for group in groups):
            yield replace(decisions, groups=tuple(groups))


def _stands_before(order: list[str], group: GroupChoice, pattern: str) -> bool:
    return group.pattern in order and order.index(group.pattern) < order.index(pattern)


def _free_patterns(problem: Problem, decisions: ShardedDecisions) -> list[str]:
    profile, found = problem.profile, dict[str, None]()
    stacks = Counter(module.pattern for module in profile.modules if module.is_layer)
    fixed = {pattern for pattern, _ in stacks.most_common(1)}
    for module in profile.modules:
        found[module.pattern] = None
        frozen = not module.needs_backward or bool(profile.kinds[module.kind].frozen_parameters)
        split = module.holds_experts and decisions.sizes.expert_size > 1
        if not module.name or frozen or split or (module.is_head and decisions.loss_chunk):
            fixed.add(module.pattern)
    return [pattern for pattern in found if pattern not in fixed]
