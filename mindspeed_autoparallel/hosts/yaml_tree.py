"""The positions of values in a YAML text, so that they can be edited without rewriting the rest.

No YAML library writes these files back unchanged (ruamel.yaml reproduces none of MindSpeed-MM's 26 byte for byte: mixed
indentation, ``null`` and quotes), so values are replaced in the text itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import parse_yaml


@dataclass
class Place:
    """A value in a text: ``start`` and ``end`` are character offsets, ``end`` without trailing blanks and comments."""

    kind: str  # "scalar", "list", "map" or "alias"
    start: int
    end: int
    column: int
    flow: bool = False
    anchor: str | None = None
    items: list[Place] = field(default_factory=list)
    keys: dict[str, tuple[Place, Place]] = field(default_factory=dict)


def places_of(text: str) -> Place | None:
    """Return the place of the whole document, ``None`` for an empty one."""
    import yaml

    events: Iterator[Any] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
    next(events)
    if isinstance(next(events), yaml.StreamEndEvent):
        return None
    return _value(text, next(events), events)


def load_tree(text: str, name: str) -> dict[str, object]:
    """Return the mapping that ``text`` holds, as the trainer's own ``yaml.safe_load`` reads it.

    Raises ``ConfigError`` with the line of a syntax error, and for a document that is not a mapping.
    """
    tree = parse_yaml(text, name)
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} has no sections: it must be a mapping of parallel, model, data, training ...")
    return tree


def _value(text: str, event: Any, events: Iterator[Any]) -> Place:
    import yaml

    start, column = event.start_mark.index, event.start_mark.column
    end = event.end_mark.index
    if isinstance(event, yaml.AliasEvent):
        return Place("alias", start, end, column, anchor=event.anchor)
    if isinstance(event, yaml.ScalarEvent):
        return Place("scalar", start, start + len(text[start:end].rstrip()), column, anchor=event.anchor)
    kind = "list" if isinstance(event, yaml.SequenceStartEvent) else "map"
    place = Place(kind, start, start, column, bool(event.flow_style), event.anchor)
    while not _ends(following := next(events)):
        child = _value(text, following, events)
        place.end = max(place.end, child.end)
        if kind == "list":
            place.items.append(child)
            continue
        value = _value(text, next(events), events)
        place.end = max(place.end, value.end)
        place.keys[text[child.start : child.end].strip("'\"")] = (child, value)
    if place.flow:
        place.end = following.end_mark.index
    return place


def _ends(event: Any) -> bool:
    import yaml

    return isinstance(event, yaml.CollectionEndEvent)
