"""The section of a plan's page on data whose samples differ: what the spread costs, and what would help."""

from __future__ import annotations

from typing import Any

from mindspeed_autoparallel.report.markup import draw_tiles, element, percent, table, text
from mindspeed_autoparallel.units import format_bytes, format_us

Data = dict[str, Any]


def section(values: Data) -> str:
    """Return steps over drawn batches, memory, what would help, and the plans that were considered."""
    mean, by_means = values["mean_us"], values["by_means_us"]
    chance = values["oom_probability"]
    tiles = [
        ("Mean step", format_us(mean), f"{values['num_draws']} drawn batches"),
        ("P95", format_us(values["p95_us"]), f"P50 {format_us(values['p50_us'])}"),
        ("The spread costs", percent(mean / by_means - 1), f"{format_us(by_means)} if all samples were the mean one"),
        ("Slowest replica", f"{values['imbalance']:.2f}", "times the mean work, in the order of the data"),
        (
            "Out of memory",
            f"at most {chance:.2g}" if chance else "cannot happen",
            f"within {values['oom_steps']} steps, for samples as described",
        ),
    ]
    worst = f"The heaviest samples together need {format_bytes(values['worst_bytes'])}"
    helps = [
        [text(what), text(format_us(step)), text(f"{(step / mean - 1) * 100:+.1f} %")]
        for what, step in (
            ("samples rearranged between replicas", values["balanced_mean_us"]),
            ("rearranged, and without padding", values["packed_mean_us"]),
        )
    ]
    rows = [
        [
            text(one["label"]),
            text(format_us(one["by_means_us"])),
            text(format_us(one["mean_us"])),
            text(format_us(one["p95_us"])),
            text(f"{one['oom_probability']:.2g}"),
        ]
        for one in values["considered"]
    ]
    header = ("plan", "by means", "mean of drawn steps", "P95", "out of memory, at most")
    note = "Only these plans were drawn: one that is slower by means may be faster for this spread."
    return (
        element("h2", "Data")
        + draw_tiles(tiles)
        + element("p", text(f"{worst} on pipeline rank {values['worst_rank']}."), class_="sub")
        + element("h3", "What would help")
        + table(("change", "mean step", "against this plan"), helps, numeric=(1, 2))
        + element("h3", "Plans considered")
        + table(header, rows, numeric=range(1, 5))
        + element("p", text(note), class_="sub")
        + "".join(element("p", text(line), class_="sub") for line in values["notes"])
    )
