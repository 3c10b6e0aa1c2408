"""HTML pieces: escaped text, elements, tables and bars."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

NUM_COLOURS = 8
"""Classes ``c0``, ``c1``, ... of report.css."""


def text(value: object) -> str:
    """Return any value as escaped text, safe between tags and in quotes."""
    return html.escape(str(value), quote=True)


def element(tag: str, inner: str = "", **attributes: object) -> str:
    """Return an element: ``inner`` is markup; attributes are escaped. ``class_`` is ``class``, ``data_tip`` is
    ``data-tip``."""
    given = "".join(f' {name.rstrip("_").replace("_", "-")}="{text(value)}"' for name, value in attributes.items())
    return f"<{tag}{given}>{inner}</{tag}>"


def embedded(value: Any) -> str:
    """Return JSON for a script element, escaped so that it cannot end the element or start a comment."""
    encoded = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def colour(index: int) -> str:
    """Return the class of a category's colour; beyond the palette the colours repeat, hatched."""
    return f"c{index % NUM_COLOURS}" + (" hatch" if index >= NUM_COLOURS else "")


_OF_TERMS = (
    *("parameters", "gradients", "optimizer", "other_microbatches", "this_microbatch", "transient", "messages"),
    *("runtime_overhead", "optimizer_step"),
)


def term_colour(name: str) -> str:
    """Return the class of a memory term's colour, the same on every page; terms that are not listed share the last."""
    return colour(_OF_TERMS.index(name) if name in _OF_TERMS else len(_OF_TERMS))


def legend(names: Sequence[str], extra: Iterable[tuple[str, str]] = (), first: int = 0) -> str:
    """Return the names with their colours; ``extra``: (class, name) of other marks; ``first``: the first name's
    colour."""
    marks = [(colour(index), name) for index, name in enumerate(names, first)] + list(extra)
    items = "".join(element("li", element("i", class_=kind) + text(name)) for kind, name in marks)
    return element("ul", items, class_="legend")


def draw_tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return figures in boxes; each is (label, value, note), all text."""
    drawn = "".join(
        element(
            "div",
            element("span", text(label), class_="label") + element("b", text(value)) + element("span", text(note)),
            class_="tile",
        )
        for label, value, note in tiles
    )
    return element("div", drawn, class_="tiles")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    """Return a table: ``header`` is text, cells are markup; columns in ``numeric`` are aligned right."""
    right = set(numeric)

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            element(tag, value, **({"class_": "n"} if index in right else {})) for index, value in enumerate(values)
        )

    head = element("thead", element("tr", cells("th", [text(name) for name in header])))
    body = element("tbody", "".join(element("tr", cells("td", row)) for row in rows))
    return element("div", element("table", head + body), class_="scroll")


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]], numeric: Iterable[int] = ()) -> str:
    """Return a table whose cells are text."""
    return table(header, [[text(value) for value in row] for row in rows], numeric)


def titled(sections: Iterable[tuple[str, str, str]]) -> str:
    """Return links to sections, each (id, title, markup), and the sections under their titles."""
    rows = list(sections)
    links = "".join(element("a", text(title), href=f"#{name}") for name, title, _ in rows)
    drawn = "".join(element("section", element("h2", text(title)) + inner, id=name) for name, title, inner in rows)
    return element("nav", links, aria_label="Sections") + drawn


def percent(fraction: float, digits: int = 1) -> str:
    return f"{fraction * 100:.{digits}f} %"


def width(fraction: float) -> str:
    """Return a style; ``fraction`` of the whole track."""
    return f"width:{max(0.0, min(1.0, fraction)) * 100:.3f}%"


def script_policy(script: str = "") -> str:
    """Return a page's content security policy: the browser refuses any resource outside the file, and every script
    whose text is not exactly ``script``."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if script else "'none'"
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; img-src data:"


@cache
def read_asset(name: str) -> str:
    """Return the text of a file in ``static``, for a page that must not load anything."""
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")
