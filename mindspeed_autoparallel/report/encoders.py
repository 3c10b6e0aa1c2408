"""Encoders with separate layouts: data, a section of the page, lines of the text table."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.report.markup import element, text, text_table
from mindspeed_autoparallel.spec.hetero import WINDOW, EncoderPhase, HeteroBest, HeteroRecord
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.units import counted, format_bytes, format_us


@dataclass(frozen=True)
class StepPart:
    """A part of the step."""

    name: str
    us: float


@dataclass(frozen=True, kw_only=True)
class HomogeneousRow:
    """The best plan with one layout for all modules."""

    layout: str
    step_us: float
    speed_up: float
    """Its step time divided by that of this plan."""
    gain: str
    """Text on the savings of layouts, batch scale and recomputing."""


@dataclass(frozen=True, kw_only=True)
class Encoders:
    """Encoders with separate layouts, and the homogeneous plan for comparison."""

    memory: str
    balance: str
    rows: tuple[EncoderPhase, ...]
    homogeneous: HomogeneousRow | None
    homogeneous_note: str
    """Reason for a missing homogeneous plan."""


@dataclass(frozen=True)
class GainPart:
    """Microseconds of the step that one change saves (negative: costs), from the homogeneous plan to the hetero one."""

    name: str
    saved_us: float


def gain_parts(homogeneous_us: float, hetero: HeteroRecord | HeteroBest, hetero_us: float) -> list[GainPart]:
    """Return the savings of layouts, batch scale and recomputing, in this order; changes that cannot be separated (the
    plan between them does not fit in memory) are one part."""
    last = "memory mode window" if hetero.memory == WINDOW else "recomputing encoders"
    steps = [("layouts", hetero.scale_one_us), ("batch scale", hetero.kept_us), (last, hetero_us)]
    if hetero.scale_one_us is None and hetero.scale_one_again_us is not None:
        steps = [("layouts", None), (last, hetero.scale_one_again_us), ("batch scale", hetero_us)]
    parts, names, before = [], [], homogeneous_us
    for name, after in steps:
        names.append(name)
        if after is not None:
            parts.append(GainPart(" with ".join(names), before - after))
            names, before = [], after
    return parts


def rival(plan: Plan) -> str:
    """Return text that compares the best hetero plan with this homogeneous one; empty if none was searched."""
    other = plan.hetero_rival
    if other is None:
        return ""
    behind = other.step_us / plan.mean_us - 1
    bound = ""
    if other.status != "optimal" and other.lower_bound_us is not None:
        bound = f", bound {format_us(other.lower_bound_us)}: not proved"
    parts = gain_parts(plan.mean_us, other, other.step_us)
    how = "more" if behind >= 0 else "less"
    return (
        f"Hetero parallel was searched too: its best plan, {other.layout.label()} (memory {other.memory}), takes "
        f"{format_us(other.step_us)}{bound}, {abs(behind):.1%} {how} than this one. "
        f"{_said(plan, parts, 'Of the difference')}"
    )


def _said(plan: Plan, parts: list[GainPart], start: str) -> str:
    by = "" if plan.data is None else " (mean drawn steps)"
    told = ", ".join(
        f"{part.name} {'save' if part.saved_us >= 0 else 'cost'} {format_us(abs(part.saved_us))}" for part in parts
    )
    return f"{start}{by}: {told}."


def encoders(plan: Plan) -> Encoders | None:
    """Return one row per encoder and the homogeneous plan for comparison; ``None`` if one layout serves all modules."""
    record = plan.hetero
    if record is None:
        return None
    other = record.homogeneous
    return Encoders(
        memory=record.memory,
        balance=record.balance,
        rows=record.encoders,
        homogeneous=None
        if other is None
        else HomogeneousRow(
            layout=other.layout.label(),
            step_us=other.step_us,
            speed_up=other.step_us / plan.mean_us,
            gain=_said(plan, gain_parts(other.step_us, record, plan.mean_us), "From it to this one"),
        ),
        homogeneous_note=record.homogeneous_note,
    )


def encoder_phases(plan: Plan) -> tuple[list[StepPart], list[StepPart]]:
    """Return every rank's phases before and after the backbone's pipeline."""
    phases = plan.hetero.encoders if plan.hetero is not None else ()
    outside = [phase for phase in phases if not phase.generator]
    before = [StepPart(f"{phase.module} forward", phase.forward_us) for phase in outside]
    after = [
        StepPart(f"{phase.module}, inside the pipeline", phase.forward_us + phase.backward_us)
        for phase in phases
        if phase.generator
    ]
    after += [StepPart(f"{phase.module} backward", phase.backward_us) for phase in outside]
    after.append(StepPart("redistribution", sum(phase.exchange_us for phase in phases)))
    return [part for part in before if part.us > 0], [part for part in after if part.us > 0]


def step_parts(plan: Plan) -> list[StepPart]:
    """Return the parts that encoders add to the step."""
    return [
        StepPart(f"{phase.module} {name}", value)
        for phase in (plan.hetero.encoders if plan.hetero is not None else ())
        for name, value in (
            ("forward", phase.forward_us),
            ("backward", phase.backward_us),
            ("redistribution", phase.exchange_us),
            ("gradients and optimizer", phase.reduction_us + phase.optimizer_us),
        )
        if value > 0
    ]


def comparison(values: Encoders) -> str:
    """Return ``1.26 times as fast as the best homogeneous plan, PP2 TP2 DP1 MBS1 (1.15 s)``."""
    other = values.homogeneous
    if other is None:
        return f"the only kind that fits: {values.homogeneous_note or 'no homogeneous plan was searched.'}"
    named = f"the best homogeneous plan, {other.layout} ({format_us(other.step_us)})"
    if other.speed_up >= 1:
        return f"{other.speed_up:.3f} times as fast as {named}. {other.gain}"
    return f"{1 / other.speed_up:.3f} times as slow as {named}. {other.gain}"


def section(values: Encoders) -> str:
    rows = [
        [
            *(row.module, row.layout.label(), row.num_layers, f"{row.num_macro_batches} of up to {row.samples}"),
            *map(format_us, (row.forward_us, row.backward_us, row.exchange_us, row.reduction_us + row.optimizer_us)),
            *map(format_bytes, (row.moved_bytes, row.held_bytes)),
        ]
        for row in values.rows
    ]
    header = ["encoder", "layout", "layers", "batches of samples", "forward", "backward", "redistribution"]
    header += ["gradients, optimizer", "moved", "held"]
    about = (
        f"Encoders run before and after the backbone's pipeline, on all ranks (memory mode {values.memory}, balance "
        f"{values.balance}). This plan is {comparison(values)}"
    )
    return element("h2", "Encoders") + element("p", text(about), class_="sub") + text_table(header, rows, range(2, 10))


def lines(plan: Plan) -> list[str]:
    """Return the lines of the text table."""
    values = encoders(plan)
    if values is None:
        return [rival(plan)] if plan.hetero_rival is not None else []
    found = [
        f"{row.module} {row.layout.label()} outside the pipeline: "
        f"{counted(row.num_macro_batches, 'batch')} of up to "
        f"{counted(row.samples, 'sample')}, {format_us(row.total_us)} of the step, "
        f"holds {format_bytes(row.held_bytes)}"
        for row in values.rows
    ]
    return [*found, f"hetero (memory {values.memory}): {comparison(values)}"]
