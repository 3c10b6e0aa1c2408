"""The plan as one HTML file: no network, no other files; every value of a plan is escaped."""

from __future__ import annotations

from mindspeed_autoparallel.report import encoders, sections, spread
from mindspeed_autoparallel.report.data import Report, report_data
from mindspeed_autoparallel.report.document import document
from mindspeed_autoparallel.report.markup import element, table, text
from mindspeed_autoparallel.spec.codec import to_json
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.units import format_bytes, format_us


def alternatives(values: Report) -> str:
    """Return other layouts at their best."""
    rows = [
        [
            element("span", text(row.layout), class_="cell"),
            text(format_us(row.step_us)),
            f"{row.loss_fraction * 100:+.1f} %",
            text("–" if row.lower_bound_us is None else format_us(row.lower_bound_us)),
            format_bytes(row.peak_bytes),
            text(row.num_recomputed),
            text("; ".join(f"{name} {'-'.join(map(str, layers))}" for name, layers in row.layers.items())),
        ]
        for row in values.alternatives
    ]
    header = ["layout", "step", "against the plan", "bound", "peak", "recomputed", "layers per stage"]
    body = table(header, rows, range(1, 6)) if rows else element("p", "No other layout was solved.", class_="soft")
    drawn = "The best split of other layouts: means of drawn steps, which the search does not bound."
    note = drawn if values.data is not None else "The best split of other layouts."
    return element("h2", "Alternatives") + element("p", note, class_="sub") + body


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
    note += " Steps and bounds are those of the mean sample." if values.data is not None else ""
    return (
        element("h2", "What was ruled out, and why")
        + element("p", text(note), class_="sub")
        + (tools + "".join(drawn) if groups else element("p", "The plan has their numbers only.", class_="soft"))
    )


def commands(values: Report, flags: str) -> str:
    """Return the commands that train with the plan and convert weights for it. ``flags``: the host's flags; may be
    empty."""
    hetero = values.encoders is not None
    train = (
        "--hetero-parallel --mm-model with the model.json that was written next to it"
        if hetero
        else "--auto-parallel-plan plan.json"
    )
    rows = [
        ["train with it, in the launch script", train],
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


def render_page(plan: Plan, flags: str = "") -> str:
    """Return a self-contained page: headline, why, stages, memory, data, timeline, alternatives, ruled-out layouts,
    commands, provenance. ``flags``: the line of the host's flags to paste, if the caller has it."""
    report = report_data(plan)
    shown = _sections(report, flags)
    links = "".join(element("a", text(title), href=f"#{name}") for name, title, _ in shown)
    body = [
        sections.headline(report),
        element("nav", links, aria_label="Sections"),
        *(element("section", drawn, id=name) for name, _, drawn in shown),
        element("footer", text(f"mindspeed-autoparallel {plan.tool_version}. Times and memory are predictions.")),
    ]
    title = f"{report.headline.layout} · {report.headline.model}"
    held = {"timeline-data": to_json(report.timeline)}
    return document(title, "\n".join(body), scripts=("report.js",), values=held)


def _sections(report: Report, flags: str) -> list[tuple[str, str, str]]:
    """Return id, title and markup of every section that the plan has."""
    shown = [
        ("why", "Why this plan", sections.why(report)),
        ("stages", "Stages", sections.stages(report)),
        ("encoders", "Encoders", encoders.section(report.encoders) if report.encoders is not None else ""),
        ("memory", "Memory", sections.memory(report)),
        ("data", "Data", spread.section(report.data) if report.data is not None else ""),
        ("timeline", "Timeline", sections.timeline(report)),
        ("alternatives", "Alternatives", alternatives(report)),
        ("ruled-out", "Ruled out", ruled_out(report)),
        ("commands", "Commands", commands(report, flags)),
        ("provenance", "Provenance", provenance(report)),
    ]
    return [section for section in shown if section[2]]
