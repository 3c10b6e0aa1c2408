"""Encoders under layouts of their own: data, a section of the page, lines of the text table."""

from __future__ import annotations

from typing import Any

from mindspeed_autoparallel.report.markup import element, table, text
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.units import format_bytes, format_us

Data = dict[str, Any]


def encoders(plan: Plan) -> Data | None:
    """Return one row per encoder and the homogeneous plan beside this one; ``None`` where one layout serves all
    modules."""
    record = plan.hetero
    if record is None:
        return None
    other = record.homogeneous
    return {
        "memory": record.memory,
        "balance": record.balance,
        "rows": [
            {
                "module": phase.module,
                "layout": phase.layout.label(),
                "num_layers": phase.num_layers,
                "num_macro_batches": phase.num_macro_batches,
                "samples": phase.samples,
                "forward_us": phase.forward_us,
                "backward_us": phase.backward_us,
                "exchange_us": phase.exchange_us,
                "tail_us": phase.reduction_us + phase.optimizer_us,
                "total_us": phase.total_us,
                "moved_bytes": phase.moved_bytes,
                "held_bytes": phase.state_bytes + phase.kept_bytes,
            }
            for phase in record.encoders
        ],
        "homogeneous": None
        if other is None
        else {
            "layout": other.layout.label(),
            "step_us": other.step_us,
            "speed_up": other.step_us / plan.step.total_us,
        },
        "homogeneous_note": record.homogeneous_note,
    }


def step_parts(plan: Plan) -> list[Data]:
    """Return what encoders add to the step."""
    return [
        {"name": f"{phase.module} {name}", "us": value}
        for phase in (plan.hetero.encoders if plan.hetero is not None else ())
        for name, value in (
            ("forward", phase.forward_us),
            ("backward", phase.backward_us),
            ("redistribution", phase.exchange_us),
            ("gradients and optimizer", phase.reduction_us + phase.optimizer_us),
        )
        if value > 0
    ]


def comparison(values: Data) -> str:
    """Return ``1.26 times as fast as the best homogeneous plan, PP2 TP2 DP1 MBS1 (1.15 s)``."""
    other = values["homogeneous"]
    if other is None:
        return f"no plan with one layout for all fits: {values['homogeneous_note'] or 'none was searched'}"
    named = f"the best homogeneous plan, {other['layout']} ({format_us(other['step_us'])})"
    if other["speed_up"] >= 1:
        return f"{other['speed_up']:.3f} times as fast as {named}"
    return f"{1 / other['speed_up']:.3f} times as slow as {named}"


def section(values: Data) -> str:
    """Return the page's section."""
    rows = [
        [
            text(row["module"]),
            text(row["layout"]),
            text(row["num_layers"]),
            text(f"{row['num_macro_batches']} of at most {row['samples']}"),
            text(format_us(row["forward_us"])),
            text(format_us(row["backward_us"])),
            text(format_us(row["exchange_us"])),
            text(format_us(row["tail_us"])),
            text(format_bytes(row["moved_bytes"])),
            text(format_bytes(row["held_bytes"])),
        ]
        for row in values["rows"]
    ]
    header = [
        "encoder",
        "layout",
        "layers",
        "batches of samples",
        "forward",
        "backward",
        "redistribution",
        "gradients, optimizer",
        "moved",
        "held",
    ]
    about = (
        f"Encoders run before and after the backbone's pipeline, on all ranks (memory mode {values['memory']}, balance "
        f"{values['balance']}). This plan is {comparison(values)}."
    )
    return element("h2", "Encoders") + element("p", text(about), class_="sub") + table(header, rows, range(2, 10))


def lines(plan: Plan) -> list[str]:
    """Return the lines of the text table."""
    values = encoders(plan)
    if values is None:
        return []
    found = [
        f"{row['module']} {row['layout']} outside the pipeline: {row['num_macro_batches']} batches of at most "
        f"{row['samples']} samples, {format_us(row['total_us'])} of the step, holds {format_bytes(row['held_bytes'])}"
        for row in values["rows"]
    ]
    return [*found, f"hetero (memory {values['memory']}): {comparison(values)}"]
