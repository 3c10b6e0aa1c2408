"""The plan as one HTML file: no network, no other files; every value of a plan is escaped."""

from __future__ import annotations

from mindspeed_autoparallel.report import encoders, search_sections, sections, spread
from mindspeed_autoparallel.report.data import Report, report_data
from mindspeed_autoparallel.report.document import document
from mindspeed_autoparallel.report.markup import element, text
from mindspeed_autoparallel.spec.codec import to_json
from mindspeed_autoparallel.spec.plan import Plan


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
        ("alternatives", "Alternatives", search_sections.alternatives(report)),
        ("ruled-out", "Ruled out", search_sections.ruled_out(report)),
        ("commands", "Commands", search_sections.commands(report, flags)),
        ("provenance", "Provenance", search_sections.provenance(report)),
    ]
    return [section for section in shown if section[2]]
