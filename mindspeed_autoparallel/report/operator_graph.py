"""The operator graph as SVG: layers from top to bottom, a box per operator, coloured edges where bytes are sent."""

from __future__ import annotations

from typing import Any

from mindspeed_autoparallel.report.markup import NUM_COLOURS, element, text
from mindspeed_autoparallel.units import format_bytes

Group = dict[str, Any]

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 210, 46, 40, 36, 8
_CHIP_HEIGHT = 16
_LABEL = 120
"""Room at the right for labels of edges that pass beside the boxes."""
_LETTER = 6.6
"""Width of a letter, for chips and for shortening names."""


def draw_graph(groups: list[Group], colours: dict[str, int]) -> str:
    """Return ``groups`` in an order in which inputs come first; ``colours``: of each axis name."""
    if not groups:
        return element("p", "No operators.", class_="soft")
    places = _places(groups)
    across = max(x for x, _ in places) + 1
    deep = max(y for _, y in places) + 1
    width = 2 * _MARGIN + across * (_WIDTH + _GAP_X) + _LABEL
    height = 2 * _MARGIN + deep * (_HEIGHT + _GAP_Y) - _GAP_Y
    corner: list[tuple[float, float]] = [
        (_MARGIN + x * (_WIDTH + _GAP_X), _MARGIN + y * (_HEIGHT + _GAP_Y)) for x, y in places
    ]
    rows = [y for _, y in places]
    edges = "".join(
        _edge(corner[given["group"]], corner[index], given, _beside(corner, rows, rows[given["group"]], rows[index]))
        for index, group in enumerate(groups)
        for given in group["inputs"]
    )
    boxes = "".join(_box(corner[index], group, colours) for index, group in enumerate(groups))
    return element(
        "svg",
        edges + boxes,
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width:g}",
        role="img",
        aria_label="Operators from inputs to output",
    )


def _places(groups: list[Group]) -> list[tuple[float, int]]:
    """Return (column, row): a row below all inputs; columns centred, in the order of the graph."""
    rows: list[int] = []
    for group in groups:
        rows.append(1 + max((rows[given["group"]] for given in group["inputs"]), default=-1))
    members: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault(row, []).append(index)
    widest = max(map(len, members.values()))
    columns = [0.0] * len(groups)
    for held in members.values():
        for position, index in enumerate(held):
            columns[index] = position + (widest - len(held)) / 2
    return list(zip(columns, rows, strict=True))


def _beside(corner: list[tuple[float, float]], rows: list[int], above: int, below: int) -> float:
    """Return right of every box between two rows; 0 where nothing is between."""
    between = [x for (x, _), row in zip(corner, rows, strict=True) if above < row < below]
    return max(between) + _WIDTH + _GAP_X / 2 if between else 0.0


def _edge(start: tuple[float, float], end: tuple[float, float], given: Group, beside: float) -> str:
    """Return a line down, or around the boxes between: out at the right of one box and in at the right of the other."""
    shift = _WIDTH / 4 if beside else 0.0
    x0, y0 = start[0] + _WIDTH / 2 + shift, start[1] + _HEIGHT
    x1, y1 = end[0] + _WIDTH / 2 + shift, end[1]
    if beside:
        drawn = (
            f"M{x0:g},{y0:g} C{x0:g},{y0 + _GAP_Y:g} {beside:g},{y0:g} {beside:g},{y0 + _GAP_Y:g} "
            f"L{beside:g},{y1 - _GAP_Y:g} C{beside:g},{y1:g} {x1:g},{y1 - _GAP_Y:g} {x1:g},{y1:g}"
        )
        label_x, label_y = beside + 5, (y0 + y1) / 2
    else:
        middle = (y0 + y1) / 2
        drawn = f"M{x0:g},{y0:g} C{x0:g},{middle:g} {x1:g},{middle:g} {x1:g},{y1:g}"
        # Near the reader: edges part from one box and label themselves where they arrive.
        label_x, label_y = x1 + 6, y1 - 5
    sent = given["forward_bytes"] + given["backward_bytes"]
    path = element("path", d=drawn, stroke_width=2.5 if sent else 1.2, class_="sent" if sent else "plain")
    if not sent:
        return path
    label = f"{format_bytes(given['forward_bytes'])} + {format_bytes(given['backward_bytes'])}"
    return path + element("text", text(label), x=f"{label_x:g}", y=f"{label_y:g}", class_="soft")


def _box(corner: tuple[float, float], group: Group, colours: dict[str, int]) -> str:
    x, y = corner
    counted = f" ×{group['count']}" if group["count"] > 1 else ""
    room = int((_WIDTH - 16) / _LETTER) - len(counted)
    name = group["name"] if len(group["name"]) <= room else "…" + group["name"][-(room - 1) :]
    drawn = element("title", text(f"{group['name']}: {group['kind']}"))
    drawn += element("rect", x=f"{x:g}", y=f"{y:g}", width=_WIDTH, height=_HEIGHT, rx=7, class_="box")
    drawn += element("text", text(name + counted), x=f"{x + 8:g}", y=f"{y + 17:g}")
    at, top = x + 8, y + 24
    for axis, parts in group["parts"].items():
        label = f"{axis} / {parts}"
        wide = len(label) * _LETTER + 8
        fill = f"fill:var(--c{colours[axis] % NUM_COLOURS})"
        drawn += element("rect", x=f"{at:g}", y=f"{top:g}", width=f"{wide:g}", height=_CHIP_HEIGHT, rx=4, style=fill)
        drawn += element("text", text(label), x=f"{at + 4:g}", y=f"{top + 12:g}", style="fill:var(--on-bar)")
        at += wide + 4
    if not group["parts"]:
        drawn += element("text", "not cut", x=f"{at:g}", y=f"{top + 12:g}", class_="soft")
    return element("g", drawn)
