"""The plan per operator as one HTML file in the style of the report: picture, tables, Megatron's configuration."""

from __future__ import annotations

import math
from typing import Any

from mindspeed_autoparallel.report.document import document
from mindspeed_autoparallel.report.markup import (
    colour,
    draw_tiles,
    element,
    legend,
    percent,
    table,
    text,
    text_table,
    titled,
)
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
    header = ["tensor", "number", "read by", "from", "to", "collectives", "gradient"]
    header += ["sent forward", "backward", "time"]
    rows = []
    for move in moves[:_MOST_MOVES]:
        first, *others = move["readers"]
        back = f"{move['gradient']} ({', '.join(move['backward_collectives']) or 'nothing'})"
        sent = [format_bytes(move["count"] * move[key]) for key in ("forward_bytes", "backward_bytes")]
        cells = [move["tensor"], move["count"], first + (f" and {len(others)} more" if others else "")]
        cells += [move["from"], move["to"], ", ".join(move["forward_collectives"]) or "–"]
        rows.append([*cells, back if move["gradient"] else "–", *sent, format_us(move["total_us"])])
    left = len(moves) - len(rows)
    told = element("p", text(f"{left} others are cheaper and in the JSON."), class_="sub") if left else ""
    return element("p", text(note), class_="sub") + text_table(header, rows, (1, 7, 8, 9)) + told


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


_MOST_ROWS = 400
"""Rows of the table of operators, limited to those that send most."""


def render_operator_page(values: Data) -> str:
    """Return the page of a plan's ``picture_data``. No network; every name is escaped."""
    sections = (
        ("modules", "Modules", draw_explorer(values["tree"])),
        ("moves", "What moves where", draw_moves(values["moves"])),
        ("constraints", "Constraints", draw_constraints(values["constraints"])),
        ("operators", "Operators", _operators(values)),
        ("megatron", "Megatron", _megatron(values)),
    )
    title = f"Operator plan · {values['search_mode']} · {_devices(values)} devices"
    body = (
        element("header", element("div", element("h1", text(title)) + _headline(values)))
        + _notes(values["notes"])
        + _tiles(values)
        + titled(sections)
        + element("footer", "Bytes are predictions: what one device sends for one step.")
    )
    return document(
        title,
        body,
        styles=("operators.css",),
        scripts=("operator_tree.js", "operator_view.js"),
        values={"explorer-data": values["tree"]},
    )


def _devices(values: Data) -> int:
    return int(values["stages"] * math.prod(values["mesh"]))


def _headline(values: Data) -> str:
    mesh = " x ".join(map(str, values["mesh"])) or "1"
    stages = values["stages"]
    pipeline = f" in each of {stages} pipeline stages" if stages > 1 else ""
    return element("p", text(f"Mesh of {mesh} devices{pipeline}; {values['num_operators']} operators."), class_="sub")


def _notes(notes: list[str]) -> str:
    items = "".join(element("li", text(note)) for note in notes)
    return element("ul", items, class_="warnings", aria_label="Notes") if items else ""


def _tiles(values: Data) -> str:
    sent = values["forward_bytes"] + values["backward_bytes"]
    tiles = [
        ("Most products", f"{values['data_parallel']} x {values['model_parallel']}", "data parallel x model parallel"),
        ("Sent per step", format_bytes(sent), "by one device, forward and backward"),
        ("Backward", format_bytes(values["backward_bytes"]), "of it, gradients of weights included"),
        ("Search", f"{values['search_s']:.2f} s", values["search_mode"].replace("_", " ")),
    ]
    if values["megatron"]:
        extra = values["megatron"]["extra_us"]
        total = values["megatron"]["plan_cost"]["total_us"]
        shown = f"{extra / total * 100:+.1f} %" if total else "–"
        tiles.append(("Uniform for Megatron", shown, "step time by the cost model"))
    return draw_tiles(tiles)


def _operators(values: Data) -> str:
    names = dict.fromkeys(cut for group in values["groups"] for cut in group["cuts"] if cut)
    colours = {name: index for index, name in enumerate(names)}
    header = ["operator", "equal ones", "kind", "output"]
    header += [f"cut {d + 1} / {n}" for d, n in enumerate(values["mesh"])]
    header += ["share of a device", "sent forward", "backward"]
    shown = values["groups"]
    if len(shown) > _MOST_ROWS:
        shown = sorted(shown, key=lambda group: -group["forward_bytes"] - group["backward_bytes"])[:_MOST_ROWS]
    rows = [
        [
            text(group["name"]),
            text(group["count"]),
            text(group["kind"]),
            text(" x ".join(map(str, group["shape"]))),
            *(
                element("span", text(cut), class_=f"chip {colour(colours[cut])}") if cut else "–"
                for cut in group["cuts"]
            ),
            percent(group["local_share"]),
            format_bytes(group["forward_bytes"]),
            format_bytes(group["backward_bytes"]),
        ]
        for group in shown
    ]
    last = len(header)
    left = len(values["groups"]) - len(shown)
    told = element("p", text(f"{left} others send less and are in the JSON."), class_="sub") if left else ""
    return table(header, rows, (1, last - 3, last - 2, last - 1)) + told


def _megatron(values: Data) -> str:
    given = values["megatron"]
    if not given:
        return element("p", text(values["megatron_reason"] or "No configuration was derived."))
    plan, uniform = given["plan_cost"], given["uniform_cost"]
    rows = [
        [
            name,
            *(format_us(cost[key]) for key in ("compute_us", "communication_us", "total_us")),
            *(format_bytes(cost[key]) for key in ("sent_bytes", "parameter_bytes")),
        ]
        for name, cost in (("plan per operator", plan), ("uniform", uniform))
    ]
    roles = ", ".join(f"{dim['devices']} {dim['role']} ({percent(dim['share'], 0)})" for dim in given["mesh_dims"])
    sentence = (
        f"Mesh dims by the vote of the operators' FLOPs: {roles or 'none'}. {given['operators_changed']} operators are "
        "cut otherwise than in the plan."
    )
    header = ["", "compute", "communication", "step", "sent", "weights of a device"]
    return (
        element("p", text(sentence), class_="sub")
        + text_table(header, rows, range(1, 6))
        + element("p", text(" ".join(given["flags"])), class_="mono", style="margin-top:12px")
        + _notes(given["notes"])
    )
