"""The plan as one HTML file: no network, no other files; every value of a plan is escaped."""

from __future__ import annotations

from typing import Any

from mindspeed_autoparallel.report import data, encoders, search_sections, sections, spread
from mindspeed_autoparallel.report.document import document
from mindspeed_autoparallel.report.markup import element, text
from mindspeed_autoparallel.spec.plan import Plan

SECTIONS = (
    ("why", "Why this plan", sections.why),
    ("stages", "Stages", sections.stages),
    ("encoders", "Encoders", lambda values: encoders.section(values["encoders"])),
    ("memory", "Memory", sections.memory),
    ("data", "Data", lambda values: spread.section(values["data"])),
    ("timeline", "Timeline", sections.timeline),
    ("alternatives", "Alternatives", search_sections.alternatives),
    ("ruled-out", "Ruled out", search_sections.ruled_out),
    ("commands", "Commands", search_sections.commands),
    ("provenance", "Provenance", search_sections.provenance),
)


def render_page(plan: Plan, flags: str = "") -> str:
    """Return a self-contained page: headline, why, stages, memory, data, timeline, alternatives, what was ruled out,
    commands, provenance. ``flags``: the line of the host's flags to paste, where the caller has it."""
    values: dict[str, Any] = {**data.report_data(plan), "flags": flags}
    shown = [part for part in SECTIONS if part[0] not in ("encoders", "data") or values[part[0]] is not None]
    links = "".join(element("a", text(title), href=f"#{name}") for name, title, _ in shown)
    body = [
        sections.headline(values),
        element("nav", links, aria_label="Sections"),
        *(element("section", draw(values), id=name) for name, _, draw in shown),
        element("footer", text(f"mindspeed-autoparallel {plan.tool_version}. Times and memory are predictions.")),
    ]
    title = f"{values['headline']['layout']} · {values['headline']['model']}"
    return document(title, "\n".join(body), scripts=("report.js",), values={"timeline-data": values["timeline"]})
