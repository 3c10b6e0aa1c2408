"""Set values in a YAML text and keep every other character: comments, order, indentation, quotes and line ends.

No YAML library writes these files back unchanged (ruamel.yaml reproduces none of MindSpeed-MM's 26 byte for byte).
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
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
    while type(following := next(events)) not in (yaml.SequenceEndEvent, yaml.MappingEndEvent):
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


Value = bool | int | float | str | None | Sequence[str]
_INDENT = 2


def with_values(text: str, values: Mapping[str, Value], name: str) -> str:
    """Return ``text`` with each dotted key of ``values`` set; equal values change nothing.

    Missing keys and sections are added at the end of the section that holds them. A value with an anchor (``&MBS 16``)
    changes with everything that refers to it. Raises ``ConfigError`` if a section itself is shared by an anchor, so
    that the edit would change another place as well, and if it is not a mapping.
    """
    wanted = copy.deepcopy(load_tree(text, name))
    for key, value in values.items():
        plain = list(value) if isinstance(value, list | tuple) else value
        if _get(wanted, key) == plain and type(_get(wanted, key)) is type(plain):
            continue
        for one in (key, *_references(places_of(text), key)):
            _set(wanted, one, plain, name)
        text = _edited(text, key.split("."), plain, name)
    if load_tree(text, name) != wanted:
        raise ConfigError(
            f"{name} shares values by anchors (&name, *name) that the plan must change separately: write them out."
        )
    return text


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return _MISSING
        tree = tree[part]
    return tree


_MISSING = object()


def _references(root: Place | None, key: str) -> list[str]:
    """Return the dotted keys whose value is an alias of the anchor at ``key``."""
    place = root
    for part in key.split("."):
        place = place.keys[part][1] if place is not None and part in place.keys else None
    if root is None or place is None or place.anchor is None or place.kind == "alias":
        return []
    found, below = [], [("", root)]
    while below:
        path, one = below.pop()
        below += [(f"{path}.{name}".lstrip("."), value) for name, (_, value) in one.keys.items()]
        if one.kind == "alias" and one.anchor == place.anchor:
            found.append(path)
    return found


def _set(tree: dict[str, object], key: str, value: Any, name: str) -> None:
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        if tree.get(part) is None:
            tree[part] = {}
        # Values shared by an anchor are one object in the tree; the edited tree needs copies.
        section = tree[part] = copy.copy(tree[part])
        if not isinstance(section, dict):
            raise ConfigError(f"{name}: {'.'.join(parents[: depth + 1])} must be a section with keys.")
        tree = section
    tree[last] = value


def _edited(text: str, path: list[str], value: Any, name: str) -> str:
    place = places_of(text)
    if place is None or place.flow:
        raise ConfigError(f"{name} must be a block of sections, one below another, to be written.")
    parent, depth = place, 0
    while depth < len(path) - 1:
        entry = parent.keys.get(path[depth])
        if entry is None:
            break
        if entry[1].kind == "alias":
            raise ConfigError(f"{name}: {'.'.join(path[: depth + 1])} is an alias of another section: write it out.")
        if entry[1].kind != "map":
            return _replace_value(text, parent, entry, _nested(path[depth + 1 :], value))
        parent, depth = entry[1], depth + 1
    entry = parent.keys.get(path[depth])
    if entry is None:
        return _insert(text, parent, path[depth], _nested(path[depth + 1 :], value))
    return _replace_value(text, parent, entry, value)


def _nested(path: list[str], value: Any) -> Any:
    for part in reversed(path):
        value = {part: value}
    return value


def _replace_value(text: str, parent: Place, entry: tuple[Place, Place], value: Any) -> str:
    key, old = entry
    if isinstance(value, list) and value and old.kind == "list" and not old.flow and old.items:
        return _replace_items(text, old, value)
    if isinstance(value, list | dict) and value and not parent.flow:
        written = _block(value, key.column + _INDENT, _newline(text))
        return text[: key.end] + ":" + _comment_after(text, old) + written + text[_line_end(text, old.end) :]
    start = _value_start(text, key, old)
    blank = "" if text[start - 1 : start] in (" ", "\n") else " "
    anchor = f"&{old.anchor} " if old.anchor and old.kind != "alias" else ""
    return text[:start] + blank + anchor + _flow(value, parent.flow) + text[max(old.end, start) :]


def _value_start(text: str, key: Place, old: Place) -> int:
    """Return where the value is written: right after the colon if it is on separate lines."""
    on_line = "\n" not in text[key.end : old.start] and old.end > old.start
    return old.start if on_line else text.index(":", key.end) + 1


def _comment_after(text: str, old: Place) -> str:
    rest = text[old.end : _line_end(text, old.end)].strip()
    return f" {rest}" if rest.startswith("#") else ""


def _replace_items(text: str, old: Place, values: list[str]) -> str:
    """Keep the lines of items that stay, with their comments; remove and insert whole lines."""
    lines = [(_line_start(text, item.start), _line_end(text, item.end)) for item in old.items]
    present = [load_tree("x: " + text[item.start : item.end], "item")["x"] for item in old.items]
    first_line = text[lines[0][0] :]
    indent, newline = first_line[: len(first_line) - len(first_line.lstrip(" "))], _newline(text)
    edits: list[tuple[int, int, str]] = []
    for kind, low, high, first, last in difflib.SequenceMatcher(None, present, values, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        added = "".join(f"{indent}- {_flow(value, False)}{newline}" for value in values[first:last])
        edits += [(lines[index][0], _after_newline(text, lines[index][1]), "") for index in range(low, high)]
        at = lines[low][0] if low < len(lines) else _after_newline(text, lines[-1][1])
        if at == len(text) and not text.endswith("\n"):
            added = newline + added.removesuffix(newline)
        edits.append((at, at, added))
    # At the same position, additions come before removals.
    for start, end, added in sorted(edits, key=lambda edit: (edit[0], edit[1]), reverse=True):
        text = text[:start] + added + text[end:]
    return text


def _insert(text: str, parent: Place, key: str, value: Any) -> str:
    if parent.flow:
        comma = ", " if parent.keys else ""
        return f"{text[: parent.end - 1].rstrip()}{comma}{key}: {_flow(value, True)}{text[parent.end - 1 :]}"
    newline = _newline(text)
    column = next(iter(parent.keys.values()))[0].column
    at = _line_end(text, parent.end)
    written = _block(value, column + _INDENT, newline) if isinstance(value, list | dict) and value else None
    return f"{text[:at]}{newline}{' ' * column}{key}:{written or ' ' + _flow(value, False)}{text[at:]}"


def _block(value: Any, column: int, newline: str) -> str:
    """Return a list or mapping as block lines, beginning with the line break after its key."""
    indent = newline + " " * column
    if isinstance(value, dict):
        return "".join(
            f"{indent}{key}:"
            + (
                _block(one, column + _INDENT, newline)
                if isinstance(one, list | dict) and one
                else f" {_flow(one, False)}"
            )
            for key, one in value.items()
        )
    return "".join(f"{indent}- {_flow(one, False)}" for one in value)


def _flow(value: Any, inside_flow: bool) -> str:
    """Return ``value`` on one line; text is quoted only where it must be."""
    if isinstance(value, list):
        return f"[{', '.join(_flow(one, True) for one in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(one, True)}' for key, one in value.items())}}}"
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        written = repr(value)
        return written if "e" not in written or "." in written else written.replace("e", ".0e", 1)
    return value if _stays_plain(value, inside_flow) else json.dumps(value, ensure_ascii=False)


def _stays_plain(value: str, inside_flow: bool) -> bool:
    written = f"x: [{value}]" if inside_flow else f"x: {value}"
    try:
        read = load_tree(written, "value")["x"]
    except ConfigError:
        return False
    return bool(read == ([value] if inside_flow else value))


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    return end - 1 if text[end - 1 : end] == "\r" and end > at else end


def _after_newline(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1
