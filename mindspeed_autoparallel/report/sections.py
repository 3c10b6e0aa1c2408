"""The sections of the page, each drawn only from the data."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.report.data import Report
from mindspeed_autoparallel.report.headline import gap_percent
from mindspeed_autoparallel.report.markup import (
    colour,
    draw_tiles,
    element,
    legend,
    percent,
    table,
    term_colour,
    text,
    text_table,
    width,
)
from mindspeed_autoparallel.report.stages import ModuleRow, StageRow
from mindspeed_autoparallel.units import GIB, US_PER_MS, counted, format_bytes, format_us

ENCODERS = 4
"""Colour of the encoders' phases in the timeline; keep equal to that in ``report.js``."""

FIRST_MODULE = 2
"""Colour of the first module: the first two colours mark forward and backward."""


def headline(values: Report) -> str:
    """Return the title, the five main figures, and warnings."""
    head, answer = values.headline, values.answer
    badge = element("span", text(head.proof), class_="badge good" if head.proved else "badge warn")
    where = f"{head.num_nodes} × {head.devices_per_node} {answer.device} · {head.schedule}"
    batch = f"global batch {head.global_batch_size} · {counted(head.num_microbatches, 'microbatch')}"
    title = element(
        "div",
        element("h1", text(head.layout))
        + element("p", text(f"{head.model}{answer.parameters} · {where} · {batch}"), class_="soft")
        + badge,
    )
    spread = "predicted"
    if head.p50_us is not None and head.p95_us is not None:
        mean = "mean of drawn steps; " if values.data is not None else ""
        spread = f"{mean}P50 {format_us(head.p50_us)}, P95 {format_us(head.p95_us)}"
    gain = ("–", "no rule of thumb fits")
    if simple := [row.loss_fraction for row in values.baselines[1:] if row.feasible and row.loss_fraction is not None]:
        gain = f"{min(simple) * 100:+.1f} %", "best rule of thumb that fits"
    if answer.plain_loss is not None:
        gain = f"{answer.plain_loss * 100:+.1f} %", f"best plain recipe: {answer.plain_layout}"
    bound = "no faster plan in the space" if head.proved else f"bound {format_us(head.lower_bound_us)}"
    if values.data is not None:
        bound, gain = f"{bound}, for the mean sample", (gain[0], f"{gain[1]}, for the mean sample")
    tiles = [
        ("Step time", format_us(answer.step_us), spread),
        ("Throughput", f"{answer.tokens_per_s:,.0f}", f"tokens/s; {answer.tokens_per_s_per_device:,.0f} a device"),
        *([("MFU", percent(answer.mfu), "of the 16-bit peak, no recompute")] if answer.mfu else []),
        ("1 T tokens", f"{answer.days_per_trillion:,.1f} days", "of training"),
        ("Memory left", format_bytes(answer.headroom_bytes), answer.memory),
        ("Bubble", percent(head.bubble_fraction), "of the pipeline, average rank"),
        *([("Gap to the bound", gap_percent(head.gap_fraction), bound)] if head.searched else []),
        *([("Without a search", *gain)] if values.baselines[1:] else []),
    ]
    notes = "".join(element("li", text(warning)) for warning in head.warnings)
    return (
        element("header", title)
        + (element("ul", notes, class_="warnings", aria_label="Warnings") if notes else "")
        + draw_tiles(tiles)
    )


def why(values: Report) -> str:
    """Return the plan compared with the rules of thumb and hetero parallel, its limits, and possible gains."""
    rows = values.baselines
    longest = max((row.step_us or 0.0) for row in rows)
    bars = []
    for index, row in enumerate(rows):
        label, note = format_us(row.step_us) if row.step_us else "", row.note
        if not row.feasible:
            label = f"{label} – does not fit".strip(" –") if label else "does not fit"
        elif row.loss_fraction:
            label += f" ({row.loss_fraction * 100:+.1f} %)"
        fill = element("i", class_="c0" if index == 0 else "c7", style=width((row.step_us or 0.0) / longest))
        shown = f"{row.name}: {label}" + (f"\n{note}" if note else "")
        bars += [
            element("span", text(row.name)),
            element("div", element("div", fill, class_="fill"), class_="track", data_tip=shown, tabindex=0),
            element("span", text(label), class_="" if row.feasible else "bad"),
        ]
    limits = "".join(element("li", text(limit)) for limit in values.limits)
    helps = [
        (
            item.change,
            format_us(item.step_us) if item.step_us else "not solved",
            percent(item.gain_fraction) if item.gain_fraction is not None else "–",
        )
        for item in values.relaxations
    ]
    none = element("p", "Nothing recorded.", class_="soft")
    held = element("h3", "What holds it back") + (element("ul", limits, class_="plain") if limits else none)
    helped = element("h3", "What would help")
    helped += text_table(["change", "step", "gain per sample"], helps, (1, 2)) if helps else ""
    parts = ", ".join(f"{part.name} {format_us(part.us)}" for part in values.step_parts)
    compared = "Step time against rules of thumb in the same layout and the best plain recipe. " if rows[1:] else ""
    of_mean = " Bars, parts, limits and gains are those of the mean sample." if values.data is not None else ""
    return (
        element("h2", "Why this plan")
        + element("p", text(f"{compared}The step: {parts}.{of_mean}"), class_="sub")
        + (element("p", text(values.rival), class_="sub") if values.rival else "")
        + (element("div", "".join(bars), class_="bars") if rows[1:] else "")
        + element("div", element("div", held) + (element("div", helped) if helps else ""), class_="two")
    )


def stages(values: Report) -> str:
    """Return the layers and recompute of every module, and times, per stage; with virtual stages a row per rank."""
    rows = values.stages
    names = list(dict.fromkeys(part.name for row in rows for part in row.modules))
    note = "Layers by number, and how many of them are computed again in the backward pass."
    if overhead_us := values.headline.pass_overhead_us:
        note += f" Every forward and backward takes {format_us(overhead_us)} more, outside of the blocks."
    marks = [("forward", "forward"), ("backward", "backward, with recompute"), ("c7 hatch", "recomputed layers")]
    drawn = _by_chunk(rows, names) if any(row.chunk for row in rows) else _by_stage(rows, names)
    return element("h2", "Stages") + element("p", text(note), class_="sub") + legend(names, marks, FIRST_MODULE) + drawn


def _by_stage(rows: Sequence[StageRow], names: list[str]) -> str:
    most, slowest = _most_layers(rows), _slowest_us(rows)
    drawn = []
    for row in rows:
        held = {part.name: part for part in row.modules}
        drawn.append(
            [
                text(row.stage),
                *(_module(held.get(name), index, most[name]) for index, name in enumerate(names, FIRST_MODULE)),
                f"{row.forward_us / US_PER_MS:.1f}",
                f"{row.backward_us / US_PER_MS:.1f}",
                _passes(row, slowest, 110),
                format_bytes(row.peak_bytes) if row.peak_bytes is not None else "",
            ]
        )
    header = ["stage", *names, "forward ms", "backward ms", "per microbatch", "peak"]
    last = len(header) - 1
    return table(header, drawn, (last - 3, last - 2, last))


def _by_chunk(rows: Sequence[StageRow], names: list[str]) -> str:
    """Return a row per rank and a column per chunk."""
    most, slowest = _most_layers(rows), _slowest_us(rows)
    ranks: dict[int, list[StageRow]] = {}
    for row in rows:
        ranks.setdefault(row.rank, []).append(row)
    drawn = []
    for rank, own in ranks.items():
        cells = []
        for row in own:
            held = {part.name: part for part in row.modules}
            parts = [_module(held[n], i, most[n]) for i, n in enumerate(names, FIRST_MODULE) if n in held]
            cells.append("".join(parts) + _passes(row, slowest, 90))
        total_us = sum(row.forward_us + row.backward_us for row in own)
        peak = own[0].peak_bytes
        drawn.append(
            [text(rank), *cells, f"{total_us / US_PER_MS:.1f}", format_bytes(peak) if peak is not None else ""]
        )
    chunks = max(map(len, ranks.values()))
    header = ["rank", *(f"chunk {chunk}" for chunk in range(chunks)), "ms per microbatch", "peak"]
    return table(header, drawn, (chunks + 1, chunks + 2))


def _most_layers(rows: Sequence[StageRow]) -> dict[str, int]:
    most: dict[str, int] = {}
    for part in (part for row in rows for part in row.modules):
        most[part.name] = max(most.get(part.name, 0), part.num_layers)
    return most


def _slowest_us(rows: Sequence[StageRow]) -> float:
    return max(row.forward_us + row.backward_us for row in rows) or 1.0


def _passes(row: StageRow, slowest_us: float, least_px: int) -> str:
    """Return a bar of a stage's forward and backward."""
    bar = element("i", class_="forward", style=width(row.forward_us / slowest_us))
    bar += element("i", class_="backward", style=width(row.backward_us / slowest_us))
    tip = f"forward {format_us(row.forward_us)}, backward {format_us(row.backward_us)}"
    return element("div", bar, class_="mini", style=f"min-width:{least_px}px", data_tip=tip)


def _module(part: ModuleRow | None, index: int, most: int) -> str:
    """Return ``0-25 (26), 9 full`` over a bar whose recomputed part is hatched."""
    if part is None:
        return element("span", "–", class_="soft")
    again = sum(part.recompute.values())
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(part.recompute.items()))
    counts = f"· {part.num_layers}" + (f" · {kinds}" if kinds else "")
    label = f"{part.range} " + element("small", text(counts))
    bar = ""
    if again:
        bar += element("i", class_=f"{colour(index)} hatch", style=width(again / most))
    if part.num_layers > again:
        bar += element("i", class_=colour(index), style=width((part.num_layers - again) / most))
    note = f"{part.name}: layers {part.range}, {part.num_layers} in all\nrecompute: {kinds or 'none'}"
    return element("div", label + element("div", bar, class_="mini"), class_="cell", data_tip=note)


def memory(values: Report) -> str:
    """Return the stacked bars by term against the limit, and the same as a table."""
    terms = values.memory.terms
    names = [name.replace("_", " ") for name in terms]
    ranks = values.memory.ranks
    most = max((max(rank.peak_bytes, rank.limit_bytes) for rank in ranks), default=GIB) * 1.02
    bars = []
    for rank in ranks:
        tip = f"Rank {rank.pipeline_rank}"
        fill = "".join(
            element(
                "i",
                class_=term_colour(term),
                style=width(size / most),
                data_tip=f"{tip}: {name}\n{format_bytes(size)}, {percent(size / rank.peak_bytes, 0)}",
            )
            for term, name in zip(terms, names, strict=True)
            if (size := rank.terms.get(term, 0))
        )
        share = rank.peak_bytes / rank.limit_bytes
        over = share > 1
        mark = element(
            "div",
            class_="limit",
            style=f"left:{rank.limit_bytes / most * 100:.3f}%",
            data_tip=f"limit {format_bytes(rank.limit_bytes)}",
        )
        label = f"{format_bytes(rank.peak_bytes)} · {percent(share, 0)}" + (" · over the limit" if over else "")
        bars += [
            element("span", text(f"rank {rank.pipeline_rank}")),
            element("div", element("div", fill, class_="fill") + mark, class_="track"),
            element("span", text(label), class_="bad" if over else "", data_tip=f"Peak at: {rank.peak_point}"),
        ]
    rows = [
        (
            rank.pipeline_rank,
            *(format_bytes(rank.terms.get(term, 0)) for term in terms),
            *map(format_bytes, (rank.peak_bytes, rank.limit_bytes)),
            rank.peak_point,
        )
        for rank in ranks
    ]
    numbers = text_table(["rank", *names, "peak", "limit", "where the peak is"], rows, range(1, len(names) + 3))
    limits = sorted({rank.limit_bytes for rank in ranks})
    shown = " to ".join(format_bytes(limit) for limit in dict.fromkeys((limits[0], limits[-1]))) if limits else "–"
    return (
        element("h2", "Memory")
        + element("p", text(f"Predicted peak on the devices of every pipeline rank. Limit {shown}."), class_="sub")
        + legend([], [*((term_colour(term), name) for term, name in zip(terms, names, strict=True)), ("mark", "limit")])
        + element("div", "".join(bars), class_="bars thin" if len(ranks) > 16 else "bars")
        + element("details", element("summary", "The same as numbers") + numbers)
    )


def timeline(values: Report) -> str:
    """Return the canvas that the script draws on, and a description of its contents."""
    shown = values.timeline
    if shown.error:
        return element("h2", "Timeline") + element("p", text(f"Not drawn: {shown.error}"), class_="soft")
    buttons = "".join(
        element("button", text(phase.name), type="button", data_phase=index, aria_pressed="false")
        for index, phase in enumerate(shown.phases)
    )
    buttons += element("span", class_="gap")
    buttons += element("button", "−", id="wider", type="button", aria_label="Zoom out")
    buttons += element("button", "+", id="closer", type="button", aria_label="Zoom in")
    note = (
        f"Exact replay of the schedule: {format_us(shown.end_us)} for {counted(shown.num_microbatches, 'microbatch')}"
    )
    if shown.message_us > 0:
        how = "each, inferred from the predicted time" if shown.inferred else "at most"
        note += f", messages between stages {format_us(shown.message_us)} {how}"
    off = shown.end_us / shown.predicted_us - 1 if shown.predicted_us else 0.0
    if abs(off) > 1e-3:
        note += f". The plan predicts {format_us(shown.predicted_us)}: the replay is {off * 100:+.1f} % off"
        note += ", as its microbatches are all average ones" if shown.variable else ""
    chunks = ". Later chunks of a rank are paler" if shown.num_chunks > 1 else ""
    help_ = "Drag to move, Ctrl + wheel or +/− to zoom; numbers are microbatches"
    marks = [("forward", "forward"), ("backward", "backward"), ("idle", "waiting (bubble)")]
    if shown.names:
        marks.append((colour(ENCODERS), "encoders and their transfers"))
    waiting = ", ".join(f"rank {rank} {percent(1 - busy, 0)}" for rank, busy in enumerate(shown.busy))
    return (
        element("h2", "Timeline")
        + element("p", text(f"{note}. {help_}{chunks}."), class_="sub")
        + element("div", buttons, class_="tools")
        + legend([], marks)
        + element("canvas", id="overview", aria_label="The whole step; the frame is what is shown below", role="img")
        + element("canvas", id="detail", tabindex=0, role="img", aria_label=f"Pipeline timeline. Waiting: {waiting}")
        + element("noscript", element("p", text(f"The timeline is drawn by a script. Waiting: {waiting}.")))
    )
