"""Pins: operators whose cuts the user fixes, as a pattern of names and the parts of each axis."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import NO_CUT, Graph, Node

Pins = Mapping[str, Mapping[str, int] | Sequence[Sequence[int]]]
"""``{"layers.*.qkv": {"rows": 4, "columns": 2}}``: name or pattern, then parts per axis; or the cut of each input, dim
by dim: ``{"layers.*.qkv": ((4, 1), (1, 2))}``."""


def _by_axis(pattern: str, node: Node, given: Mapping[str, int] | Sequence[Sequence[int]]) -> dict[str, int]:
    if isinstance(given, Mapping):
        return dict(given)
    if [len(cuts) for cuts in given] != [len(dims) for dims in node.operands]:
        raise ConfigError(
            f"pin {pattern}: {tuple(given)} does not fit {node.name}, whose inputs have "
            f"{[len(dims) for dims in node.operands]} dims."
        )
    wanted: dict[str, int] = {}
    for cuts, dims in zip(given, node.operands, strict=True):
        for parts, axis in zip(cuts, dims, strict=True):
            if axis is None and parts != 1:
                raise ConfigError(f"pin {pattern}: {tuple(given)} cuts a dim of {node.name} that is never cut.")
            if axis is not None and wanted.setdefault(node.axes[axis].name, parts) != parts:
                name = node.axes[axis].name
                raise ConfigError(
                    f"pin {pattern}: {tuple(given)} contradicts itself: {name} of {node.name} is cut into "
                    f"{wanted[name]} and into {parts}."
                )
    return {name: parts for name, parts in wanted.items() if parts != 1}


def parse_pins(given: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return pins written as ``OPERATOR:AXIS=PARTS,..``; raises ``ConfigError`` for another form or two that differ."""
    result: dict[str, dict[str, int]] = {}
    for text in given:
        name, _, rest = text.partition(":")
        try:
            wanted = {axis: int(parts) for axis, parts in (item.split("=") for item in rest.split(","))}
        except ValueError as error:
            raise ConfigError(f"pin {text}: write OPERATOR:AXIS=PARTS, e.g. layers.*.q:rows=4,columns=2.") from error
        if result.get(name, wanted) != wanted:
            raise ConfigError(f"pins contradict each other for {name}: {result[name]} and {wanted}. Remove one.")
        result[name] = wanted
    return result


def pinned_choices(graph: Graph, pins: Pins, mesh: tuple[int, ...]) -> list[dict[str, int]]:
    """Return, per mesh dim, the axis that each pinned operator cuts.

    Raises ``ConfigError`` for a pattern that matches nothing, an axis the operator lacks, parts that do not divide, or
    two pins that disagree about one operator (both are named).
    """
    by_operator: dict[str, tuple[str, dict[str, int]]] = {}
    for pattern, given in pins.items():
        names = [name for name in graph.nodes if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            first = ", ".join(list(graph.nodes)[:5])
            raise ConfigError(f"pin {pattern} matches no operator; the first ones are {first}.")
        for name in names:
            wanted = _by_axis(pattern, graph.nodes[name], given)
            if name in by_operator and by_operator[name][1] != wanted:
                other, before = by_operator[name]
                raise ConfigError(
                    f"pins contradict each other: {other} gives {before} and {pattern} gives {wanted} for "
                    f"operator {name}. Remove one."
                )
            by_operator[name] = (pattern, wanted)
    result: list[dict[str, int]] = [{} for _ in mesh]
    for name, (pattern, wanted) in by_operator.items():
        node = graph.nodes[name]
        axes = {axis.name: index for index, axis in enumerate(node.axes) if axis.cuttable}
        for axis_name, parts in wanted.items():
            if axis_name not in axes:
                raise ConfigError(f"pin {pattern}: operator {name} cannot cut {axis_name}; it can cut {sorted(axes)}.")
            size = node.axes[axes[axis_name]].size
            if not isinstance(parts, int) or parts < 1 or size % parts:
                raise ConfigError(f"pin {pattern}: {axis_name} of {name} is {size}, which {parts} parts do not divide.")
        rest = dict(wanted)
        for dim, factor in enumerate(mesh):
            axis_name = next((a for a, parts in rest.items() if parts > 1 and parts % factor == 0), "")
            result[dim][name] = axes[axis_name] if axis_name else NO_CUT
            if axis_name:
                rest[axis_name] //= factor
        if any(parts > 1 for parts in rest.values()):
            raise ConfigError(
                f"pin {pattern}: {wanted} needs {math.prod(wanted.values())} devices, which does not divide "
                f"{math.prod(mesh)}."
            )
    return result
