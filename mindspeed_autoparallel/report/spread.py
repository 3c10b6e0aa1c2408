"""The section of a plan's page on data whose samples differ: the cost of the spread, and possible gains."""

from __future__ import annotations

from mindspeed_autoparallel.report.markup import draw_tiles, element, percent, text, text_table
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.spec.plan_records import DataRecord
from mindspeed_autoparallel.units import format_bytes, format_us


def section(values: DataRecord) -> str:
    """Return steps over drawn batches, memory, possible gains, and the plans considered."""
    mean, by_means = values.mean_us, values.by_means_us
    chance, error = values.oom_probability, values.mean_error_us
    tiles = [
        ("Mean step", format_us(mean), f"{values.num_draws} drawn batches"),
        ("P95", format_us(values.p95_us), f"P50 {format_us(values.p50_us)}"),
        (
            "The spread costs",
            percent(mean / by_means - 1),
            f"{format_us(by_means)} if all samples were the mean one; standard error <= {percent(error / by_means)}",
        ),
        ("Slowest replica", f"{values.imbalance:.2f}", "times the mean work, in the order of the data"),
        (
            "Out of memory",
            f"at most {chance:.2g}" if chance else "cannot happen",
            values.memory_note or f"within {values.oom_steps} steps, for samples as described",
        ),
    ]
    worst = f"The heaviest samples together need {format_bytes(values.worst_bytes)}"
    helps = [
        (what, format_us(step), f"{(step / mean - 1) * 100:+.1f} %")
        for what, step in (
            ("samples rearranged between replicas", values.balanced_mean_us),
            ("rearranged, and without padding", values.packed_mean_us),
        )
    ]
    rows = [
        (one.label, *map(format_us, (one.by_means_us, one.mean_us, one.p95_us)), f"{one.oom_probability:.2g}")
        for one in values.considered
    ]
    header = ("plan", "by means", "mean of drawn steps", "P95", "out of memory, at most")
    note = "Only these plans were drawn: one that is slower by means may be faster for this spread."
    return (
        element("h2", "Data")
        + draw_tiles(tiles)
        + element("p", text(f"{worst} on pipeline rank {values.worst_rank}."), class_="sub")
        + element("h3", "What would help")
        + text_table(("change", "mean step", "against this plan"), helps, (1, 2))
        + element("h3", "Plans considered")
        + text_table(header, rows, range(1, 5))
        + element("p", text(note), class_="sub")
        + "".join(element("p", text(line), class_="sub") for line in values.notes)
    )


def text_lines(plan: Plan) -> list[str]:
    """Return a plan's record of the spread of its data; nothing for a plan of equal samples."""
    data = plan.data
    if data is None:
        return []
    lines = [
        f"data: step {data.by_means_us / 1000:.3f} ms if all samples were the mean one; of {data.num_draws} drawn "
        f"steps mean {data.mean_us / 1000:.3f}, P50 {data.p50_us / 1000:.3f}, P95 {data.p95_us / 1000:.3f}: the spread "
        f"costs {data.mean_us / data.by_means_us - 1:.1%} (standard error at most "
        f"{data.mean_error_us / data.by_means_us:.1%})",
        f"data: in the order of the data the slowest replica has {data.imbalance:.2f} times the mean work",
    ]
    if not data.is_balanced and data.balanced_mean_us < 0.999 * data.mean_us:
        lines.append(
            f"would help: rearranged samples (--data-balance): {data.balanced_mean_us / 1000:.3f} ms "
            f"({data.balanced_mean_us / data.mean_us - 1:+.1%})"
        )
    if data.packed_mean_us < data.balanced_mean_us:
        lines.append(
            f"would help: rearranged samples without padding: {data.packed_mean_us / 1000:.3f} ms "
            f"({data.packed_mean_us / data.mean_us - 1:+.1%})"
        )
    chance = f"at most {data.oom_probability:.2g}" if data.oom_probability else "0 for the samples described"
    limit = plan.memory[data.worst_rank].limit_bytes
    chance = f"chance to run out of memory within {data.oom_steps} steps: {chance}"
    lines.append(
        f"data: {data.memory_note or chance}; the heaviest samples together need {format_bytes(data.worst_bytes)} of "
        f"{format_bytes(limit)} on pipeline rank {data.worst_rank}"
    )
    lines += [
        f"considered: {one.label}: {one.by_means_us / 1000:.2f} ms by means, {one.mean_us / 1000:.2f} drawn, "
        f"P95 {one.p95_us / 1000:.2f}" + f", out of memory {one.oom_probability:.2g}" * (not data.memory_note)
        for one in data.considered
    ]
    lines.append("only the plans considered were drawn: one that is slower by means may be faster for this spread")
    return [*lines, *(f"note: {note}" for note in data.notes)]
