"""Module patterns of MindSpeed's FSDP2 trainers: ``model.layers.{*}.mlp``, ``layers.{0-3}``, ``*.experts``.

A pattern matches the whole dotted name of a module. ``{*}`` is any number, ``{a-b}`` a number from a to b, both
included; ``*`` is any text, dots included, and ``?`` is one character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.profiles.sharded import ShardedModule
from mindspeed_autoparallel.spec.sharded import KEEP, ShardedDecisions

_BRACE = re.compile(r"\{([^}]*)\}")
_WILDCARDS = {"*": ".*", "?": ".", ".": r"\."}
EVERY_INDEX = "{*}"


@dataclass(frozen=True)
class ModulePattern:
    """A compiled pattern; ``ranges`` has one entry per brace, ``None`` for ``{*}``."""

    text: str
    regex: re.Pattern[str]
    ranges: tuple[tuple[int, int] | None, ...]

    def matches(self, name: str) -> bool:
        """Return whether the whole of ``name`` matches."""
        found = self.regex.match(name)
        if found is None:
            return False
        return all(
            bounds is None or bounds[0] <= int(number) <= bounds[1]
            for number, bounds in zip(found.groups(), self.ranges, strict=True)
        )


@lru_cache(maxsize=4096)
def compile_pattern(text: str) -> ModulePattern:
    """Return ``text`` compiled; raises ``ConfigError`` for braces that the trainer refuses, with a replacement."""
    regex, ranges, end = "", [], 0
    for brace in _BRACE.finditer(text):
        regex += _plain(text[end : brace.start()]) + r"(\d+)"
        ranges.append(_index_range(brace[1], text))
        end = brace.end()
    return ModulePattern(text, re.compile(f"^{regex}{_plain(text[end:])}$"), tuple(ranges))


def matching_names(patterns: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the ``names`` that match any pattern, in their order."""
    compiled = [compile_pattern(pattern) for pattern in patterns]
    return tuple(name for name in names if any(pattern.matches(name) for pattern in compiled))


def patterns_for_names(stack: str, chosen: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest list of patterns that match exactly ``chosen`` among ``names``, all of which match ``stack``.

    One entry for each run of numbers, as the trainer refuses ``{3}`` and ``{0-1,4-5}``.
    """
    if not chosen or set(chosen) == set(names):
        return (stack,) if chosen else ()
    if stack.count(EVERY_INDEX) != 1:
        return tuple(name for name in names if name in set(chosen))
    compiled = compile_pattern(stack)
    found = (compiled.regex.match(name) for name in chosen)
    numbers = {int(match[1]) for match in found if match}
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    return tuple(stack.replace(EVERY_INDEX, f"{{{low}-{high}}}") for low, high in zip(starts, ends, strict=True))


def _plain(text: str) -> str:
    return "".join(_WILDCARDS.get(letter, re.escape(letter)) for letter in text)


def _index_range(inner: str, text: str) -> tuple[int, int] | None:
    if inner == "*":
        return None
    parts = inner.split("-")
    try:
        low, high = (int(part) for part in parts)
    except ValueError:
        way_out = "write {*} or {a-b}: {3-3} for one layer, one list entry for each range"
        raise ConfigError(f"the trainer refuses the module pattern {text!r} at {{{inner}}}: {way_out}.") from None
    if low > high:
        raise ConfigError(f"the module pattern {text!r} has the range {{{inner}}}, whose start is above its end.")
    return low, high


def layers_of(modules: Sequence[ShardedModule]) -> dict[str, list[str]]:
    """Return the names of the layers of each stack, by pattern, in forward order."""
    found: dict[str, list[str]] = {}
    for module in modules:
        if module.is_layer:
            found.setdefault(module.pattern, []).append(module.name)
    return found


def policies_of(modules: Sequence[ShardedModule], policy: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    """Return the ``policy`` of each layer by its name, by the pattern of its stack, without stacks that keep all."""
    rows = {pattern: tuple(map(policy, layers)) for pattern, layers in layers_of(modules).items()}
    return {pattern: row for pattern, row in rows.items() if set(row) != {KEEP}}


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
