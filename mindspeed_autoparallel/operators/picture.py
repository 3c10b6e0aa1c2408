"""The plan as one HTML file: a row per operator in order, equal layers folded, cuts as coloured cells."""

from __future__ import annotations

import html
from collections.abc import Iterator

from mindspeed_autoparallel.operators.graph.node import NO_CUT
from mindspeed_autoparallel.operators.strategies import OperatorPlan

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def _rows(plan: OperatorPlan) -> Iterator[tuple[str, int, tuple[str, ...], int, int]]:
    """(name, how many operators of its role share the strategy, cut axis per mesh dim, forward, backward bytes)."""
    made = plan.decisions
    moved: dict[str, tuple[int, int]] = {}
    for (_, consumer, _), (forward, backward) in plan.edge_bytes().items():
        before = moved.get(consumer, (0, 0))
        moved[consumer] = (before[0] + forward, before[1] + backward)
    groups: dict[object, list[str]] = {}
    for name, node in made.graph.nodes.items():
        if node.inputs:
            sent = moved.get(name, (0, 0))
            groups.setdefault((node.role or name, made.choices[name], sent), []).append(name)
    for names in groups.values():
        node = made.graph.nodes[names[0]]
        cuts = tuple("" if c == NO_CUT else node.axes[c].name for c in made.choices[names[0]])
        yield (names[0], len(names), cuts, *moved.get(names[0], (0, 0)))


def render_picture(plan: OperatorPlan) -> str:
    """A page without scripts or network: columns are mesh dims, a coloured cell is the axis cut there; bytes in MB are
    what one device sends for the inputs of one such operator."""
    rows = list(_rows(plan))
    axes = list(dict.fromkeys(cut for row in rows for cut in row[2] if cut))
    colour = {axis: _COLOURS[index % len(_COLOURS)] for index, axis in enumerate(axes)}

    def cell(cut: str) -> str:
        style = f' style="background:{colour[cut]};color:#fff"' if cut else ""
        return f"<td{style}>{html.escape(cut) or '-'}</td>"

    head = "".join(f"<th>cut {d + 1} / {n}</th>" for d, n in enumerate(plan.decisions.mesh))
    body = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{count}</td>{''.join(map(cell, cuts))}"
        f"<td>{forward / 1e6:.2f}</td><td>{backward / 1e6:.2f}</td></tr>"
        for name, count, cuts, forward, backward in rows
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in plan.notes)
    dp, mp = plan.dp_mp()
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>Operator plan</title>'
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 8px;text-align:left}</style></head><body>"
        f"<h1>{html.escape(plan.search_mode)}: data parallel {dp}, model parallel {mp}, stages {plan.stages}</h1>"
        f"<ul>{notes}</ul><table><thead><tr><th>operator</th><th>equal ones</th>{head}"
        f"<th>forward MB</th><th>backward MB</th></tr></thead><tbody>{body}</tbody></table></body></html>\n"
    )
