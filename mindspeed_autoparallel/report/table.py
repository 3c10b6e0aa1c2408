"""The plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.files import printable
from mindspeed_autoparallel.report import answer, data, encoders, headline, search_data, spread, stages
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.units import US_PER_MS, format_bytes, format_us

NUM_LIMITS = 3


def render_table(plan: Plan, tokens: float | None = None, *, with_verdicts: bool = False) -> str:
    """Return a row per stage and module (units in the header), then step time, proof, baselines, limits, the spread of
    the data, other layouts and warnings.

    ``tokens``: those of the whole training, to add its days. ``with_verdicts``: add a line for every layout searched.
    """
    head, figures, at_mean = headline.headline(plan), answer.answer_of(plan), headline.at_mean_sample(plan)
    lines = [
        f"{head.layout} for {head.model}{figures.parameters} on {head.num_nodes} x {head.devices_per_node} "
        f"{figures.device}: "
        f"{head.num_microbatches} microbatches, global batch {head.global_batch_size}",
        *_stage_rows(plan),
        *encoders.lines(plan),
        _step_line(plan),
        *(line.strip() for line in answer.answer_lines(plan, tokens)[1:]),
        "the step: " + ", ".join(f"{part.name} {format_us(part.us)}" for part in data.step_parts(plan)) + at_mean,
    ]
    if plan.data is None and head.p95_us is not None and head.p50_us is not None:
        lines.append(f"with variable data: P50 {format_us(head.p50_us)}, P95 {format_us(head.p95_us)}")
    if not head.searched:
        lines.append("edited by hand: proofs and comparisons of the searched plan do not hold for this one")
    elif not head.proved:
        gap = headline.gap_percent(head.gap_fraction)
        lines.append(f"no plan is faster than {format_us(head.lower_bound_us)}: gap {gap}{at_mean}")
    lines += filter(None, (search_data.virtual_comparison(plan), search_data.group_sizes(plan)))
    lines += [f"limited by: {limit}" for limit in plan.search.limits[:NUM_LIMITS]]
    for item in search_data.relaxations(plan)[:NUM_LIMITS]:
        if item.gain_fraction and item.step_us is not None:
            gain = f"{item.gain_fraction * 100:.1f} % per sample, step {format_us(item.step_us)}{at_mean}"
            lines.append(f"would help: {item.change} ({gain})")
    lines += spread.text_lines(plan)
    others = enumerate(search_data.alternatives(plan), start=2)
    lines += [f"{place}. {other.layout}: {format_us(other.step_us)}" for place, other in others]
    lines.append(_provenance(plan))
    lines += [f"warning: {warning}" for warning in head.warnings]
    if with_verdicts:
        lines += [f"{one.layout.label()}: {one.outcome}: {one.reason}" for one in plan.search.verdicts]
    return "\n".join(printable(line).rstrip() for line in lines) + "\n"


def _stage_rows(plan: Plan) -> list[str]:
    virtual = plan.layout.virtual_size > 1
    header = ["stage", "rank", "module", "layers", "recompute", "forward_ms", "backward_ms", "peak"]
    rows = [header]
    for stage in stages.stages(plan):
        times = [f"{stage.forward_us / US_PER_MS:.1f}", f"{stage.backward_us / US_PER_MS:.1f}"]
        # A rank has one peak: with several chunks it is in the row of the first.
        peak = stage.peak_bytes if stage.chunk == 0 else None
        times.append("" if peak is None else format_bytes(peak))
        parts = stage.modules or [None]
        for index, part in enumerate(parts):
            name = [str(stage.stage), str(stage.rank)] if index == 0 else ["", ""]
            cells = [part.name, part.range, _recompute(part.recompute)] if part else [stage.end_alone or "-", "", ""]
            rows.append([*name, *cells, *(times if index == 0 else ["", "", ""])])
    if not virtual:
        rows = [[row[0], *row[2:]] for row in rows]
    return aligned(rows, left=rows[0].index("module"))


def _recompute(kinds: dict[str, int]) -> str:
    """Return ``0``, ``12 full``, ``4 full + 2 selective``."""
    return " + ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "0"


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _step_line(plan: Plan) -> str:
    simple = []
    for base in plan.baselines:
        value = format_us(base.step_us) if base.feasible and base.step_us is not None else "does not fit"
        simple.append(f"{base.title}: {value}")
    others = f" ({', '.join(simple)}{headline.at_mean_sample(plan)})" if simple else ""
    mean = "" if plan.data is None else ", the mean of drawn steps"
    return (
        f"step {format_us(plan.mean_us)} predicted{mean}, bubble {plan.step.bubble_fraction * 100:.0f} %; "
        f"{headline.proof(plan)}{others}"
    )


def _provenance(plan: Plan) -> str:
    profile = plan.profile
    counts = {group.outcome: len(group.rows) for group in search_data.verdicts(plan)}
    made = ", ".join(filter(None, (profile.device, profile.created_utc)))
    ruled_out = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"profile {profile.source}, {made}; {plan.search.num_configurations} configurations" + (
        f": {ruled_out}" if ruled_out else ""
    )
