"""Costs at Ulysses and expert sizes above 1, computed from those measured at size 1.

Ulysses gives each rank an equal part of the tokens outside attention and of the heads inside it, so work and
activations of the decoder are divided by its size; encoders in front of it run in full on every rank. Under expert
parallelism a rank computes as many token rows on average, with fewer experts, so its costs stay the same. A note in the
profile marks these costs as computed.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from mindspeed_autoparallel.profiles.sharded import CostPoint, ModuleCosts, ModuleKind, ShardedProfile

_NOTE = "costs at Ulysses and expert sizes above 1 are computed from those measured at 1"


def with_divided_costs(profile: ShardedProfile) -> ShardedProfile:
    """Return ``profile`` with costs at all Ulysses sizes that divide its heads and expert sizes that divide experts."""
    heads = math.gcd(*profile.attention_heads)
    contexts = [size for size in range(1, heads + 1) if heads % size == 0]
    experts = [size for size in range(1, max(1, profile.num_experts) + 1) if max(1, profile.num_experts) % size == 0]
    divided = _divided_kinds(profile)
    kinds = {
        name: replace(
            kind,
            costs=(
                *kind.costs,
                *(
                    _divided(costs, context if name in divided else 1, _at(costs.at, context, expert))
                    for costs in kind.costs
                    if costs.at == CostPoint(micro_batch_size=costs.at.micro_batch_size)
                    for context in contexts
                    for expert in experts
                    if context * expert > 1
                ),
            ),
        )
        for name, kind in profile.kinds.items()
    }
    computed = len(contexts) * len(experts) > 1 and _has_whole(profile.kinds)
    return replace(profile, kinds=kinds, notes=(*profile.notes, _NOTE) if computed else profile.notes)


def _has_whole(kinds: dict[str, ModuleKind]) -> bool:
    points = {costs.at for kind in kinds.values() for costs in kind.costs}
    return any(point == CostPoint(micro_batch_size=point.micro_batch_size) for point in points)


def _at(point: CostPoint, context: int, expert: int) -> CostPoint:
    return replace(point, ulysses_size=context, expert_size=expert)


def _divided(costs: ModuleCosts, ranks: int, at: CostPoint) -> ModuleCosts:
    values: dict[str, Any] = {field.name: getattr(costs, field.name) for field in fields(costs) if field.name != "at"}
    for name, value in values.items():
        if not isinstance(value, bool):
            values[name] = value / ranks if isinstance(value, float) else value // ranks
    # A rank has gradients of whole parameters, however few of a sample's tokens.
    whole = costs.made_gradient_bytes
    values["made_gradient_bytes"] = whole
    values["backward_transient_bytes"] = whole + (costs.backward_transient_bytes - whole) // ranks
    return ModuleCosts(at=at, **values)


def _divided_kinds(profile: ShardedProfile) -> set[str]:
    """Return the kinds of modules in the decoder: siblings of the token embedding and their submodules, and the
    head."""
    embedding = next((module for module in profile.modules if module.kind.endswith(":Embedding")), None)
    decoder = embedding.name.rpartition(".")[0] if embedding else ""
    return {
        module.kind
        for module in profile.modules
        if module.is_head or module.name == decoder or (module.name and module.name.startswith(decoder))
    }
