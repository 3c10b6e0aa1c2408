"""Lists of module patterns in the files of FSDP2 trainers: their modules, and the lists for a plan's layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.patterns import compile_pattern, matching_names, patterns_for_names
from mindspeed_autoparallel.profiles.sharded import ShardedModule
from mindspeed_autoparallel.spec.sharded import ShardedDecisions


def layers_of(modules: Sequence[ShardedModule]) -> dict[str, list[str]]:
    """Return the names of the layers of each stack, by pattern, in forward order."""
    found: dict[str, list[str]] = {}
    for module in modules:
        if module.is_layer:
            found.setdefault(module.pattern, []).append(module.name)
    return found


def changed_list(
    decisions: ShardedDecisions, modules: Sequence[ShardedModule], meaning: Collection[str], present: Sequence[str]
) -> list[str] | None:
    """Return the patterns of the layers whose policy is one of ``meaning``; ``None`` if ``present`` matches the same.

    Patterns of ``present`` that match no layer are kept.
    """
    patterns: list[str] = []
    wanted: set[str] = set()
    stacks = layers_of(modules)
    for pattern, layers in stacks.items():
        chosen = [name for index, name in enumerate(layers) if decisions.policy(pattern, index) in meaning]
        patterns += patterns_for_names(pattern, chosen, layers)
        wanted |= set(chosen)
    layer_names = [name for layers in stacks.values() for name in layers]
    if list(matching_names(present, layer_names)) == [name for name in layer_names if name in wanted]:
        return None
    return [*(one for one in present if not matching_names([one], layer_names)), *patterns]


def wrapped_patterns(
    where: str, everything: Sequence[str], ignored: Sequence[str], modules: Sequence[ShardedModule]
) -> tuple[str, ...]:
    """Return the patterns of ``modules`` that the list ``everything`` wraps, in its order.

    Raises ``ConfigError``, beginning with ``where``, for a list that wraps only some modules of a pattern.
    """
    found: dict[str, None] = {}
    stacks: dict[str, list[str]] = {}
    for module in modules:
        if module.name:
            stacks.setdefault(module.pattern, []).append(module.name)
    left_out = [compile_pattern(one) for one in ignored]
    for text in everything:
        for pattern, members in stacks.items():
            if pattern in found or not matching_names([text], members):
                continue
            whole = matching_names(everything, members)
            kept = [name for name in whole if not any(one.matches(name) for one in left_out)]
            if kept and len(kept) < len(members):
                raise ConfigError(
                    f"{where} wraps {len(kept)} of the {len(members)} modules {pattern}; a plan wraps all or none: "
                    f"list {pattern}."
                )
            if kept:
                found[pattern] = None
    return tuple(found)
