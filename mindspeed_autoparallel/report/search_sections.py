"""The page's sections on the search: other layouts, ruled-out layouts, and the sources of the figures."""

from __future__ import annotations

from mindspeed_autoparallel.report.data import Report
from mindspeed_autoparallel.report.markup import element, table, text
from mindspeed_autoparallel.units import format_bytes, format_us


def alternatives(values: Report) -> str:
    """Return other layouts at their best."""
    rows = [
        [
            element("span", text(row.layout), class_="cell"),
            text(format_us(row.step_us)),
            f"{row.loss_fraction * 100:+.1f} %",
            text(format_us(row.lower_bound_us)),
            format_bytes(row.peak_bytes),
            text(row.num_recomputed),
            text("; ".join(f"{name} {'-'.join(map(str, layers))}" for name, layers in row.layers.items())),
        ]
        for row in values.alternatives
    ]
    header = ["layout", "step", "against the plan", "bound", "peak", "recomputed", "layers per stage"]
    body = table(header, rows, range(1, 6)) if rows else element("p", "No other layout was solved.", class_="soft")
    return element("h2", "Alternatives") + element("p", "The best split of other layouts.", class_="sub") + body


def ruled_out(values: Report) -> str:
    """Return all configurations by outcome, with a filter."""
    head, groups = values.headline, values.verdicts
    chips = "".join(
        element("button", text(group.outcome), type="button", data_outcome=group.outcome, aria_pressed="false")
        for group in groups
    )
    total = sum(len(group.rows) for group in groups)
    field = '<input id="search" type="search" placeholder="Filter, e.g. TP8 memory" aria-label="Filter">'
    shown = element("span", text(f"{total} shown"), id="shown", class_="soft")
    tools = element("div", field + chips + shown, class_="tools")
    chosen = " " + element("span", "the plan", class_="badge good")
    drawn = []
    for group in groups:
        rows = [
            [
                element("span", text(row.layout), class_="cell") + (chosen if row.chosen else ""),
                text(row.reason),
                text(format_us(row.step_us) if row.step_us else "–"),
                text(format_us(row.lower_bound_us) if row.lower_bound_us else "–"),
            ]
            for row in group.rows
        ]
        title = element("b", text(group.outcome)) + f" · {element('span', text(len(rows)), class_='n')} · "
        summary = element("summary", title + element("span", text(group.meaning), class_="soft"))
        body = table(["layout", "reason", "step", "bound"], rows, (2, 3))
        opened = {"open": ""} if group.outcome == "solved" else {}
        drawn.append(element("details", summary + body, class_="group", data_group=group.outcome, **opened))
    note = f"{head.num_configurations} configurations, {head.num_solved} split to the end"
    note += f" in {head.search_seconds:.1f} s."
    return (
        element("h2", "What was ruled out, and why")
        + element("p", text(note), class_="sub")
        + (tools + "".join(drawn) if groups else element("p", "The plan has their numbers only.", class_="soft"))
    )


def commands(values: Report, flags: str) -> str:
    """Return the commands that train by the plan and convert weights for it. ``flags``: the host's flags; may be
    empty."""
    hetero = values.encoders is not None
    train = (
        "--hetero-parallel --mm-model with the model.json that was written beside it"
        if hetero
        else "--auto-parallel-plan plan.json"
    )
    rows = [
        ["train by it, in the launch script", train],
        ["weights from Hugging Face", "mindspeed-autoparallel convert hf-to-mm HF_FOLDER TARGET --plan plan.json"],
        [
            "a checkpoint of another layout",
            "mindspeed-autoparallel convert resplit CHECKPOINT TARGET --hf-dir HF_FOLDER --plan plan.json",
        ],
    ]
    if flags:
        rows.insert(0, ["the same as flags", flags])
    drawn = [[text(what), element("span", text(command), class_="mono")] for what, command in rows]
    return element("h2", "Commands") + table(["", ""], drawn)


def provenance(values: Report) -> str:
    """Return the sources of the figures."""
    profile = values.headline.profile
    rows = [
        ["profile", text(", ".join(filter(None, (profile.source, profile.device, profile.created_utc))))],
        ["profile hash", element("span", text(profile.sha256 or "–"), class_="mono")],
        ["model hash", element("span", text(profile.model_hash or "–"), class_="mono")],
    ]
    notes = "".join(element("li", text(note)) for note in profile.notes)
    return (
        element("h2", "Provenance")
        + table(["", ""], rows)
        + (element("h3", "Interpolated or assumed") + element("ul", notes, class_="plain") if notes else "")
    )
