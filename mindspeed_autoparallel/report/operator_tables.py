"""Parts of the operator page: the zoomable picture, the redistributions, the cost of each constraint."""

from __future__ import annotations

from typing import Any

from mindspeed_autoparallel.report.markup import element, legend, table, text
from mindspeed_autoparallel.units import format_bytes, format_us

Data = dict[str, Any]

_MOST_MOVES = 400
"""Rows of the table, limited to the most expensive; the JSON has all."""


def draw_explorer(tree: Data) -> str:
    """Return the canvas on which ``operator_view.js`` draws ``tree``, with its controls and a place for details."""
    note = (
        "Double-click a module to open or close it, drag to move, Ctrl + wheel or + and - to zoom, 0 for the whole. A "
        "module too small to read is drawn closed until it is zoomed in. The bar under a box has a line per mesh dim "
        "in the colour of the axis that is cut; edges that send are coloured."
    )
    buttons = (("closer", "+"), ("wider", "−"), ("whole", "fit"), ("open-all", "open all"), ("close-all", "close all"))
    controls = "".join(element("button", text(label), id=name, type="button") for name, label in buttons)
    find = element("input", id="find", type="search", placeholder="find an operator, Enter", aria_label="Find")
    canvas = element("canvas", "", id="explorer", tabindex="0", role="img", aria_label="Operators by module")
    return (
        element("p", text(note), class_="sub")
        + legend(tree["axes"])
        + element("div", controls + find.removesuffix("</input>"), class_="controls")
        + canvas
        + element("pre", "", id="explored", aria_live="polite")
    )


def draw_moves(moves: list[Data]) -> str:
    """Return the table of redistributions, most expensive first."""
    if not moves:
        return element("p", "Nothing is sent.", class_="sub")
    note = (
        "A row per tensor and the placement its readers want, repeated layers once with their number. Per mesh dim: "
        "S(d) is cut by tensor dim d, R whole, P a pending sum. Bytes and time are of one device, all of them together."
    )
    header = [
        "tensor",
        "number",
        "read by",
        "from",
        "to",
        "collectives",
        "gradient",
        "sent forward",
        "backward",
        "time",
    ]
    rows = [
        [
            text(move["tensor"]),
            text(move["count"]),
            text(move["readers"][0] + (f" and {len(move['readers']) - 1} more" if len(move["readers"]) > 1 else "")),
            text(move["from"]),
            text(move["to"]),
            text(", ".join(move["forward_collectives"]) or "–"),
            text(
                f"{move['gradient']} ({', '.join(move['backward_collectives']) or 'nothing'})"
                if move["gradient"]
                else "–"
            ),
            format_bytes(move["count"] * move["forward_bytes"]),
            format_bytes(move["count"] * move["backward_bytes"]),
            format_us(move["total_us"]),
        ]
        for move in moves[:_MOST_MOVES]
    ]
    left = len(moves) - len(rows)
    told = element("p", text(f"{left} others are cheaper and in the JSON."), class_="sub") if left else ""
    return element("p", text(note), class_="sub") + table(header, rows, (1, 7, 8, 9)) + told


def draw_constraints(constraints: list[Data]) -> str:
    """Return the plan's cost without each constraint, and the pins of the products' cuts in that case."""
    if not constraints:
        return element("p", text("Not requested: add --constraints."), class_="sub")
    rows = []
    for given in constraints:
        without = given["without_us"]
        rows.append(
            [
                text(given["constraint"]),
                format_us(given["with_us"]),
                "–" if without is None else format_us(without),
                "–" if without is None else format_us(given["cost_us"]),
                "<br>".join(element("code", text(f"--pin '{pin}'")) for pin in given["pins"]) or "–",
                text(given["note"]),
            ]
        )
    return table(["constraint", "step with it", "without", "it costs", "without it", "note"], rows, (1, 2, 3))
