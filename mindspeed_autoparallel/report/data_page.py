"""A data distribution as one HTML file in the report's style: histograms, joint distribution, padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from mindspeed_autoparallel.data import statistics
from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.data.statistics import QUANTILES, Figure, Histogram, JointHistogram, Summary, padding_share
from mindspeed_autoparallel.report.document import document
from mindspeed_autoparallel.report.markup import draw_tiles, element, percent, table, text, text_table, titled

_WIDTH, _HEIGHT, _FOOT = 640, 180, 18
_LEFT, _TOP = 56, 22
"""Pixels left of and above the bars, for the axis of samples."""
_CELL = 22


def render_data_page(data: Distribution) -> str:
    """Return a self-contained page: no network, every name escaped."""
    rows = statistics.summarize(data)
    sections = [("sizes", "Sizes of samples", _sizes(rows, data))]
    sections += [(row.name, row.name.capitalize(), _column(row, data)) for row in rows]
    varying = [row.name for row in rows if len(data.column(row.name)[0]) > 1 and row.name not in ("images", "clips")]
    drawn = "".join(_joint(statistics.joint(data, pair)) for pair in combinations(varying, 2))
    if drawn:
        sections.append(("joint", "Together", drawn))
    sections.append(("padding", "Padding", _padding(data)))
    title = f"Data · {', '.join(name.rsplit('/', 1)[-1] for name in data.source.files)}"
    body = (
        element("header", element("div", element("h1", text(title)) + _headline(data)))
        + _tiles(rows, data)
        + titled(sections)
        + element("footer", text(f"sha256 of the records: {data.source.sha256}"))
    )
    return document(title, body, styles=("data.css",))


def _headline(data: Distribution) -> str:
    source = data.source
    read = "all read" if source.is_whole else f"{source.num_read} read, drawn at random (seed {source.seed})"
    words = f"{source.num_records} samples, {read}. Tokens of text: {source.tokens_by}."
    return element("p", text(words), class_="sub")


def _tiles(rows: Sequence[Summary], data: Distribution) -> str:
    tokens = rows[0]
    tiles = [
        ("mean sample", f"{tokens.mean.value:.0f} tokens", f"median {tokens.quantiles[0].value:.0f}"),
        ("largest sample", f"{tokens.largest} tokens", f"{tokens.largest / tokens.mean.value:.1f} times the mean"),
        ("cut", f"{data.source.num_cut}", f"at {data.source.longest_tokens} tokens" if data.source.num_cut else "none"),
        ("broken", f"{data.source.num_broken}", "records left out"),
    ]
    return draw_tiles(tiles)


def _sizes(rows: Sequence[Summary], data: Distribution) -> str:
    header = ["", "mean", *(f"P{round(100 * share)}" for share in QUANTILES), "largest", "samples without"]
    cells = [
        [text(row.name), *map(_figure, (row.mean, *row.quantiles)), text(row.largest), text(percent(row.share_without))]
        for row in rows
    ]
    drawn = table(header, cells, numeric=range(1, len(header)))
    if data.source.is_whole:
        return drawn
    unseen = statistics.unseen_share(data.source.num_read, data.source.num_records)
    note = f"Intervals hold at 95 %. Up to {percent(unseen, 3)} of the records may be larger than the largest one read."
    return drawn + element("p", text(note), class_="sub")


def _figure(figure: Figure) -> str:
    if figure.low == figure.high:
        return text(f"{figure.value:.1f}".removesuffix(".0"))
    return text(f"{figure.value:.0f}") + element("span", text(f" {figure.low:.0f}..{figure.high:.0f}"), class_="soft")


def _column(row: Summary, data: Distribution) -> str:
    drawn = _bars(statistics.histogram(*data.column(row.name)), row.name)
    marks = ", ".join(f"P{round(100 * q)} {f.value:.0f}" for q, f in zip(QUANTILES, row.quantiles, strict=True))
    return drawn + element("p", text(f"Mean {row.mean.value:.1f}, {marks}, largest {row.largest}."), class_="sub")


def _bars(found: Histogram, name: str) -> str:
    """Return bars over a horizontal axis of sizes and a vertical axis of samples."""
    highest, step = max(found.counts), _WIDTH / len(found.counts)
    bars = ""
    for count in sorted({highest, highest // 2} - {0}):
        y = _TOP + _HEIGHT * (1 - count / highest)
        bars += element("line", "", x1=_LEFT, y1=f"{y:.1f}", x2=_LEFT + _WIDTH, y2=f"{y:.1f}", class_="axis")
        bars += element("text", text(str(count)), x=_LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end")
    for index, count in enumerate(found.counts):
        size = _HEIGHT * count / highest
        tip = f"{found.edges[index]:.0f} to {found.edges[index + 1] - 1:.0f} {name}: {count} samples"
        bars += element(
            "rect",
            element("title", text(tip)),
            x=f"{_LEFT + index * step:.2f}",
            y=f"{_TOP + _HEIGHT - size:.2f}",
            width=f"{max(step - 1, 0.5):.2f}",
            height=f"{size:.2f}",
            class_="bar",
        )
    base = _TOP + _HEIGHT
    bars += element("line", "", x1=_LEFT, y1=base, x2=_LEFT + _WIDTH, y2=base, class_="axis")
    # The last edge is the start of the next bin.
    marks = {0: "start", len(found.counts) // 2: "middle", len(found.counts): "end"}
    for index, anchor in marks.items():
        words = text(f"{found.edges[index] - (index == len(found.counts)):.0f}")
        bars += element("text", words, x=f"{_LEFT + index * step:.1f}", y=base + _FOOT - 3, text_anchor=anchor)
    bars += element("text", text(name), x=_LEFT + _WIDTH / 2, y=base + 2 * _FOOT - 5, text_anchor="middle")
    bars += element("text", text("samples"), x=0, y=_TOP - 6)
    box = f"0 0 {_LEFT + _WIDTH} {_TOP + _HEIGHT + 2 * _FOOT}"
    return element("svg", bars, viewBox=box, class_="histogram", role="img")


def _joint(found: JointHistogram) -> str:
    highest = max(max(row) for row in found.counts)
    rows, columns = len(found.counts), len(found.counts[0])
    cells = ""
    for i, row in enumerate(found.counts):
        for j, count in enumerate(row):
            tip = (
                f"{found.names[0]} from {found.edges[0][i]:.0f}, {found.names[1]} from {found.edges[1][j]:.0f}: "
                f"{count} samples"
            )
            cells += element(
                "rect",
                element("title", text(tip)),
                x=i * _CELL,
                y=(columns - 1 - j) * _CELL,
                width=_CELL - 1,
                height=_CELL - 1,
                class_="bar",
                fill_opacity=f"{(count / highest) ** 0.5 if count else 0.03:.3f}",
            )
    words = f"{found.names[0]} (across) and {found.names[1]} (up): correlation {found.correlation:.2f}"
    drawn = element("svg", cells, viewBox=f"0 0 {rows * _CELL} {columns * _CELL}", class_="joint", role="img")
    return element("h3", text(words)) + drawn


def _padding(data: Distribution) -> str:
    values, counts = data.column("tokens")
    rows = [(group, percent(padding_share(values, counts, group))) for group in (1, 2, 4, 8, 16)]
    note = "Share of padding among the tokens if randomly drawn samples are padded to the longest of them."
    return element("p", text(note), class_="sub") + text_table(("samples of a microbatch", "padding"), rows, (0, 1))
