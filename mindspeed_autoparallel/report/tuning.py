"""The result of ``--auto-tuning`` as text and as one HTML file; both show exactly the contents of its JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from mindspeed_autoparallel.files import printable
from mindspeed_autoparallel.report.document import document
from mindspeed_autoparallel.report.markup import draw_tiles, element, text, text_table
from mindspeed_autoparallel.report.table import aligned
from mindspeed_autoparallel.report.tuning_result import Configuration, SampleSpread, TuningResult, Verified
from mindspeed_autoparallel.spec.plan_records import ROUNDING
from mindspeed_autoparallel.units import counted, format_bytes

_INCOMPARABLE = "not comparable"
"""Marks, in a note, a verifying run whose time is not comparable."""
SHORT_NAMES = (
    "PP pipeline stages, TP tensor, DP data, CP context, EP expert parallel, VPP virtual stages per rank, MBS samples "
    "of a microbatch, SP sequence parallel; no-dist-opt: without the distributed optimizer."
)
MISSING_AFTER = {
    "trace": "its missing traces were made by another process, or are listed as not searched",
    "calibrate": "operators and layouts without measurements are estimated from measured ones",
    "verify": "its configuration was not measured and relies on the prediction alone",
}
"""By purpose: the effect of a failed launch on the answer."""
HEADER = ("no", "configuration", "step_ms", "interval_ms", "bubble", "peak", "tokens/s/device", "recompute")


def row(plan: Configuration) -> list[str]:
    """Return the cells of a configuration, in the order of ``HEADER``."""
    low, high = plan["step_time_interval_ms"]
    layers = sum(plan["recompute"]["layers_per_stage"])
    kind = plan["recompute"]["kind"]
    return [
        str(plan["number"]),
        plan["label"],
        f"{plan['step_time_ms']:.1f}",
        f"{low:.0f} to {high:.0f}",
        f"{plan['bubble_fraction']:.0%}",
        format_bytes(max(rank["peak_bytes"] for rank in plan["memory"])),
        f"{plan['tokens_per_s_per_device']:.0f}",
        kind if kind == "none" else f"{kind}, {layers} layers",
    ]


def render_table(result: TuningResult) -> str:
    """Return three rows, the flags to paste, and the combinations left out."""
    lines = aligned([HEADER, *(row(plan) for plan in result["top"])], left=1)
    lines += ["", *_compared(result)]
    for plan in result["top"]:
        lines += ["", f"{plan['number']}. paste: {shlex.join(plan['argv'])}"]
        if plan["take_out"]:
            lines.append(f"    and remove from your command: {shlex.join(plan['take_out'])}")
        lines.append(f"    limits: {'; '.join(plan['limits'])}")
        if "samples" in plan:
            lines.append(f"    {_samples(plan['samples'])}")
    for measured in result.get("verified", ()):
        lines += _verified_lines(measured)
    lines += [*_measured_order(result), "", *_modelled(result), _about(result)]
    lines += [f"note: {note}" for note in _notes(result)]
    lines += [f"not searched: {name}: {reason}" for name, reason in result["left_out_dimensions"].items()]
    return "\n".join(printable(line).rstrip() for line in lines) + "\n"


def _notes(result: TuningResult) -> list[str]:
    """Return notes on the sources of the figures and on failed launches."""
    ended = [
        (str(launch["purpose"]), launch) for launch in result["launches"] if launch["status"] not in ("ok", "running")
    ]
    missing = [
        f"launch {launch['id']} ended with {launch['status']}: {MISSING_AFTER[purpose]}" for purpose, launch in ended
    ]
    return [*result["notes"], *missing]


def _samples(spread: SampleSpread) -> str:
    """Return text on the effect of the samples' spread on a configuration."""
    chance = f"at most {spread['oom_probability']:.2g}" if spread["oom_probability"] else "0"
    return (
        f"drawn steps: mean {spread['mean_ms']:.1f} ms, P50 {spread['p50_ms']:.1f}, P95 {spread['p95_ms']:.1f}; with "
        f"--data-balance {spread['balanced_mean_ms']:.1f}; chance to run out of memory within {spread['oom_steps']} "
        f"steps: {chance}"
    )


def _compared(result: TuningResult) -> list[str]:
    """Return how much slower the others and the script are than the first, and whether the intervals overlap."""
    best, *others = result["top"]
    slower = [f"{plan['number']} is {plan['step_time_ms'] / best['step_time_ms'] - 1:.1%} slower" for plan in others]
    near = [plan for plan in others if plan["step_time_interval_ms"][0] < best["step_time_interval_ms"][1]]
    lines = [f"predicted step times: 1 is the fastest, {', '.join(slower)}"] if slower else []
    if near and not result.get("verified"):
        names = ", ".join(str(plan["number"]) for plan in (best, *near))
        lines.append(f"the intervals of {names} overlap: --auto-tuning-verify measures which is faster")
    return [*lines, _as_given(result), _proved(result)]


def _as_given(result: TuningResult) -> str:
    given, best = result["as_given"], result["top"][0]
    if "reason" in given:
        return f"your script as it is was not predicted: {given['reason']}"
    told = f"your script as it is ({given['label']}) takes {given['step_time_ms']:.1f} ms by the same prediction"
    if not given["fits"]:
        needed = f"{format_bytes(given['peak_bytes'])} of {format_bytes(given['limit_bytes'])}"
        return f"{told}, and does not fit: it needs {needed}"
    shorter = 1 - best["step_time_ms"] / given["step_time_ms"]
    return f"{told}: {f'1 takes {shorter:.1%} less' if shorter >= 0.0005 else 'nothing faster was found'}"


def _proved(result: TuningResult) -> str:
    if "samples" in result["top"][0]:
        return (
            "ordered by drawn steps of the configurations that are best for the mean sample; one that is slower by "
            "means may be faster for this spread"
        )
    bound_ms, best_ms = result["search"]["lower_bound_ms"], result["top"][0]["step_time_ms"]
    if bound_ms >= best_ms * (1 - ROUNDING):
        return "proved by this prediction: nothing that was searched is faster than 1"
    return (
        f"not proved: nothing can be faster than {bound_ms:.1f} ms, which is {1 - bound_ms / best_ms:.1%} below 1; "
        "where the layers of pipelines lie is improved step by step"
    )


def _measured_order(result: TuningResult) -> list[str]:
    """Return the fastest configuration by the measurements; a run with fewer devices corrects the prediction for
    all."""
    measured = {item["number"]: item for item in result.get("verified", ()) if item["status"] == "ok"}
    if len(measured) < 2 or any(_INCOMPARABLE in item["note"] for item in measured.values()):
        return []
    steps = {
        plan["number"]: plan["step_time_ms"] / (1 + measured[plan["number"]]["step_error"])
        for plan in result["top"]
        if plan["number"] in measured
    }
    best, *others = sorted(steps, key=lambda number: (steps[number], number))
    slower = ", ".join(f"{number} is {steps[number] / steps[best] - 1:.1%} slower" for number in others)
    how = "corrected by these runs" if any(item["note"] for item in measured.values()) else "by these runs"
    return [f"{how}: {best} is the fastest ({steps[best]:.1f} ms), {slower}"]


def _modelled(result: TuningResult) -> list[str]:
    """Return unmeasured assumptions of the configurations."""
    return [
        f"{plan['number']}. modelled, not measured: {', '.join(plan['modelled'])}; half of what they hide is counted "
        "on, the interval spans all and nothing. Run --auto-tuning-verify before you rely on it"
        for plan in result["top"]
        if plan.get("modelled")
    ]


def _about(result: TuningResult) -> str:
    search = result["search"]
    return (
        f"{search['num_candidates']} combinations: {search['num_legal']} legal, {search['num_solved']} solved exactly, "
        f"{search['num_bounded']} proved slower, {search['num_without_room']} of the solved without room; "
        f"{search['seconds']:.1f} s. {counted(result['num_device_launches'], 'launch')} on {result['device']}, "
        f"{result['knowledge']['covered_time_share']:.1%} of the operators' time measured"
    )


def _verified_lines(measured: Verified) -> list[str]:
    if measured["status"] != "ok":
        return f"{measured['number']}. not verified: {measured['reason']}".splitlines()
    calibration = [f"   {measured['calibration']}"] if measured.get("calibration") else []
    return [
        f"{measured['number']}. measured: step {measured['measured_step_ms']:.1f} ms (predicted "
        f"{measured['predicted_step_ms']:.1f}, {measured['step_error']:+.1%}), peak "
        f"{format_bytes(measured['measured_peak_bytes'])} (predicted {format_bytes(measured['predicted_peak_bytes'])}, "
        f"{measured['memory_error']:+.1%})" + (f"; {measured['note']}" if measured.get("note") else ""),
        *calibration,
    ]


def render_tuning_page(result: TuningResult) -> str:
    """Return a self-contained page: the configurations, memory of every stage, flags, and the extent of the search."""
    sections = [
        (
            "Configurations",
            text_table(HEADER, map(row, result["top"]), (2, 5, 6)) + element("p", text(SHORT_NAMES), class_="sub"),
        ),
        ("Why the first, and what limits each", _why(result)),
        ("Flags to paste", "".join(_flags(plan) for plan in result["top"])),
        ("Memory of each pipeline rank", "".join(_memory(plan) for plan in result["top"])),
        ("Searched", _pairs(result["searched"].items())),
        ("Not searched, and why", _pairs(result["left_out_dimensions"].items())),
        (
            "Combinations left out, with N for their numbers",
            _pairs(((number, rule) for rule, number in result["left_out"].items()), ("how many", "because")),
        ),
        ("Where the figures come from", _pairs([("search", _about(result)), *(("note", n) for n in _notes(result))])),
    ]
    if modelled := _modelled(result):
        sections.insert(1, ("Modelled, not measured", "".join(element("p", text(line)) for line in modelled)))
    if result.get("verified"):
        measured = "".join(_verified(item) for item in result["verified"])
        measured += "".join(element("p", element("b", text(line))) for line in _measured_order(result))
        sections.insert(1, ("Measured", measured))
    body = "".join(element("section", element("h2", text(title)) + inner) for title, inner in sections)
    title = f"{result['top'][0]['label']} on {result['ranks']} devices"
    return document(title, f"<header><h1>{text(title)}</h1></header>\n{_tiles(result)}\n{body}")


def _tiles(result: TuningResult) -> str:
    """Return the main figures of the first configuration."""
    best, given = result["top"][0], result["as_given"]
    low, high = best["step_time_interval_ms"]
    fullest = max(best["memory"], key=lambda rank: rank["peak_bytes"] / max(1, rank["limit_bytes"]))
    nodes = max(1, result["ranks"] // result["devices_per_node"])
    own = ("–", "not predicted: see below")
    if "reason" not in given:
        gain = f"{best['step_time_ms'] / given['step_time_ms'] - 1:+.1%}" if given["fits"] else "–"
        own = (gain, given["label"] + ("" if given["fits"] else " does not fit"))
    return draw_tiles(
        [
            ("Step time", f"{best['step_time_ms']:.1f} ms", f"{low:.0f} to {high:.0f} ms"),
            ("Against your script as it is", *own),
            ("Throughput", f"{best['tokens_per_s_per_device']:,.0f}", "tokens/s per device"),
            ("Peak memory", format_bytes(fullest["peak_bytes"]), f"of {format_bytes(fullest['limit_bytes'])}"),
            ("Devices", f"{nodes} × {result['ranks'] // nodes}", result["device"]),
        ]
    )


def _verified(measured: Verified) -> str:
    first, *rest = _verified_lines(measured)
    return element("p", text(first)) + "".join(element("p", text(line), class_="mono") for line in rest)


def _flags(plan: Configuration) -> str:
    link = element("a", text("stages, memory and timeline"), href=plan["plan"].replace(".json", ".html"))
    drawn = element("h3", text(f"{plan['number']}. {plan['label']}") + " · " + link)
    drawn += element("p", text(shlex.join(plan["argv"])), class_="mono")
    if plan["take_out"]:
        drawn += element("p", text(f"and remove from your command: {shlex.join(plan['take_out'])}"), class_="mono")
    whole = element("summary", "The whole command") + element("p", text(plan["command"]), class_="mono")
    return drawn + element("details", whole)


def _why(result: TuningResult) -> str:
    told = "".join(element("p", text(line)) for line in _compared(result))
    return told + text_table(("no", "limits"), [(plan["number"], "; ".join(plan["limits"])) for plan in result["top"]])


def _memory(plan: Configuration) -> str:
    rows = [
        (rank["pipeline_rank"], *map(format_bytes, (rank["peak_bytes"], rank["limit_bytes"])), rank["peak_point"])
        for rank in plan["memory"]
    ]
    return element("h3", text(f"{plan['number']}. {plan['label']}")) + text_table(
        ("pipeline rank", "peak", "limit", "where"), rows, (0, 1, 2)
    )


def _pairs(items: Any, header: tuple[str, str] = ("what", "value")) -> str:
    pairs: Sequence[tuple[Any, Any]] = list(items)
    return text_table(header, pairs) if pairs else element("p", "nothing")
