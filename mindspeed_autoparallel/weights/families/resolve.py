"""The rules of one stack of layers: its tables, with the numbers of its ``config.json`` for their symbols."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from mindspeed_autoparallel.weights import names
from mindspeed_autoparallel.weights.families.catalogue import Family
from mindspeed_autoparallel.weights.families.sizes import Sizes
from mindspeed_autoparallel.weights.names import Rule

_Row = tuple[str, tuple[str, ...], tuple[str, ...], str, str, tuple[str, ...]]
_SEVERAL = re.compile(r"\{([a-z]+(?:,[a-z]+)+)\}")


@functools.cache
def tables() -> dict[str, tuple[_Row, ...]]:
    """Return the rows of every table: target, sources, shapes, combination, cut of the target, conditions."""
    found: dict[str, list[_Row]] = {}
    for path in sorted(Path(__file__).parent.glob("*.table")):
        rows: list[_Row] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("["):
                rows = found.setdefault(line.strip("[]"), [])
            elif line and not line.startswith("#"):
                rows.append(_row(line))
    return {name: tuple(rows) for name, rows in found.items()}


def _row(line: str) -> _Row:
    cells = [cell.strip() for cell in line.split("|")]
    target, sources, shapes, combine, split, when = cells + ["copy", "whole", ""][len(cells) - 3 :]
    named = tuple(name for source in sources.split() for name in _each(source))
    return (
        target,
        named,
        tuple(shape.strip() for shape in shapes.split(",")),
        combine,
        split,
        tuple(word.strip() for word in when.split(",") if word.strip()),
    )


def _each(source: str) -> Iterator[str]:
    several = _SEVERAL.search(source)
    if several is None:
        yield source
        return
    for word in several[1].split(","):
        yield source[: several.start()] + word + source[several.end() :]


def rules_of(
    module: str, family: Family, sizes: Sizes, layers: Collection[frozenset[str]], *, prefix: str, multi_token: bool
) -> tuple[Rule, ...]:
    """Return the rules that some layer of ``layers`` (the conditions of each) has, in writing order.

    ``prefix``: of Megatron's names, for a language model inside a larger model (``text_decoder.``).
    """
    everywhere = frozenset.intersection(*layers)

    def rules(place: str, tables_: Collection[str], here: str, there: str) -> Iterator[Rule]:
        # A layer for multi-token prediction is like the decoder's last one, always with full attention.
        later = (list(layers)[-1] - {"linear"},)
        have = {names.LAYER: layers, names.MULTI_TOKEN: later}.get(place, (everywhere,))
        for table in tables_:
            for row in tables()[table]:
                rule = _rule(module, place, row, family, sizes, (prefix, here, there), have)
                if rule is not None:
                    yield rule

    found = [*rules(names.FIRST, (family.first,), "", "")]
    found += rules(names.LAYER, family.blocks, family.target_layer, family.layer)
    found += rules(names.LAST, (family.last,), "", "")
    if multi_token:
        here = "mtp.layers.{n}."
        found += rules(names.MULTI_TOKEN, (family.multi_token,), here, family.multi_token_layer)
        found += rules(names.MULTI_TOKEN, family.blocks, here + "transformer_layer.", family.multi_token_layer)
    return tuple(found)


def _rule(
    module: str,
    place: str,
    row: _Row,
    family: Family,
    sizes: Sizes,
    prefixes: tuple[str, str, str],
    have: Collection[frozenset[str]],
) -> Rule | None:
    """Return the rule of ``row``; None if no layer of ``have`` meets its conditions, so that its sizes are not
    needed."""
    target, sources, shapes, combine, split, when = row
    untested = Rule(module=module, place=place, target=target, sources=sources, shapes=(), when=when)
    if "untrained" not in when and not any(untested.meets(words) for words in have):
        return None
    prefix, here, there = prefixes
    kind, _, groups = combine.partition(" ")
    cut, _, sections = split.partition(" ")
    return Rule(
        module=module,
        place=place,
        target=prefix + _joined(here, target),
        sources=tuple(_renamed(_joined(there, source), family) for source in sources),
        shapes=tuple(sizes.shape(shape) for shape in shapes),
        combine=kind,
        groups=sizes[groups] if groups else 1,
        split=names.ROWS if cut == "sections" else cut,
        sections=sizes.shape(sections),
        when=when,
    )


def _joined(prefix: str, name: str) -> str:
    return name[1:] if name.startswith("/") else prefix + name


def _renamed(name: str, family: Family) -> str:
    for old, new in family.rename:
        name = name.replace(old, new)
    return name
