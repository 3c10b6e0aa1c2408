"""Explicit prefetch lists: those of MindSpeed-MM in the order of ``apply_modules``, and those of Megatron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindspeed_autoparallel.profiles.sharded import ShardedModule
from mindspeed_autoparallel.schedule.sharded import Unit
from mindspeed_autoparallel.spec.sharded import GroupChoice


def _is_inside(child: str, parent: str) -> bool:
    return child.startswith(parent + ".")


def execution_order(groups: Sequence[GroupChoice], wrapped: Mapping[str, Sequence[ShardedModule]]) -> list[str]:
    """Return names of wrapped modules: groups in order, and after each module those of later groups inside it."""
    patterns = [group.pattern for group in groups if group.wrapped and group.pattern]
    waiting = {pattern: [module.name for module in wrapped.get(pattern, ())] for pattern in patterns}
    order: list[str] = []

    def insert(place: int, name: str) -> None:
        order.append(name)
        for later in range(place + 1, len(patterns)):
            if patterns[place] in patterns[later]:
                for child in [child for child in waiting[patterns[later]] if _is_inside(child, name)]:
                    if child in waiting[patterns[later]]:
                        waiting[patterns[later]].remove(child)
                        insert(later, child)

    for place, pattern in enumerate(patterns):
        while waiting[pattern]:
            insert(place, waiting[pattern].pop(0))
    return order


def _parents_first(names: list[str]) -> list[str]:
    """Swap neighbours in ``names`` until no child comes directly before a module that contains it."""
    names = list(names)
    for end in range(len(names)):
        swapped = False
        for at in range(len(names) - end - 1):
            if _is_inside(names[at], names[at + 1]):
                names[at], names[at + 1] = names[at + 1], names[at]
                swapped = True
        if not swapped:
            break
    return names


def prefetch_lists(order: Sequence[str], depths: Mapping[str, int], *, backward: bool) -> dict[str, tuple[str, ...]]:
    """Return the units that each module gathers ahead, by module name; ``depths`` is their number by module name."""
    names = _parents_first(list(reversed(order))) if backward else list(order)
    lists = {name: tuple(names[at + 1 : at + 1 + depths[name]]) for at, name in enumerate(names)}
    return {name: ahead for name, ahead in lists.items() if ahead}


def explicit_lists(
    groups: Sequence[GroupChoice], units: Sequence[ShardedModule], together: Mapping[str, Sequence[str]]
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return the units that each wrapped module of ``units`` gathers ahead in forward and in backward, by module name.

    ``together``: by layer, the modules of the units with hooks on it, which one list names together. In forward the
    first of them that is not the layer gets the layer's list; in backward the layer itself gets it.
    """
    if not any(group.forward_prefetch or group.backward_prefetch for group in groups):
        return {}, {}
    inside = {name for layer, names in together.items() for name in names if name != layer}
    listed = [one for one in units if one.name not in inside]
    order = execution_order(
        groups, {group.pattern: [one for one in listed if one.pattern == group.pattern] for group in groups}
    )
    of, pattern_of = {group.pattern: group for group in groups}, {one.name: one.pattern for one in listed}
    chosen = {name: of[pattern_of[name]] for name in order}
    forward = {name: group.forward_prefetch for name, group in chosen.items()}
    backward = {name: group.backward_prefetch for name, group in chosen.items()}
    first = {layer: next(name for name in names if name != layer) for layer, names in together.items()}

    def named(ahead: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for one in ahead for name in together.get(one, (one,)))

    ahead = prefetch_lists(order, forward, backward=False)
    behind = prefetch_lists(order, backward, backward=True)
    return (
        {first.get(name, name): named(row) for name, row in ahead.items()},
        {name: named(row) for name, row in behind.items()},
    )


def relisted(units: Sequence[Unit], patterns: Sequence[str], order: Sequence[str]) -> tuple[Unit, ...]:
    """Return units that gather the unit before them in backward, by the patterns of ``order``.

    ``patterns`` are those of the units. An entry of ``order`` that matches no unit is one of a unit without
    parameters.
    """
    found, before = list(units), None
    for pattern in order:
        for place in [place for place, one in enumerate(patterns) if one == pattern] or [-1]:
            if place >= 0 and before is not None:
                # A unit that lists itself gathers nothing: it is already gathered.
                found[place] = replace(found[place], backward_prefetch=(place if before < 0 else before,))
            before = place
    return tuple(found)
