"""docs/hosts.md's tables of the authors' trainings, from rows of ``kept_rows``."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import kept_rows
from kept_rows import TOLERANCE, Row

_BEGIN, _END = "<!-- trainings of authors: generated -->\n", "<!-- end of trainings of authors -->\n"
_REASONS = 10
"""Lines of refusals that are listed."""
_BAD = ("traceback", "timeout", "host")


def write(rows: list[Row], pages: Iterable[Path]) -> None:
    """Write the tables between their marks in ``pages``."""
    text = _by_host(rows) + "\n" + _by_reason(rows)
    for page in pages:
        content = page.read_text()
        begin, end = content.index(_BEGIN) + len(_BEGIN), content.index(_END)
        page.write_text(content[:begin] + "\n" + text + "\n" + content[end:])


def _by_host(rows: list[Row]) -> str:
    lines = [
        "| host | sets of flags (scripts) | accepted by the host alone | searched | plan's arguments accepted (those of both plans) "
        "| refused in a line | ended otherwise | flags changed without a line | slowest refusal "
        "| from flag to plan, computed costs | train in one process | by both plans with its losses "
        "| as native flags do | with other losses or not | largest difference "
        "| trainings run, taken from a row with equal arguments |",
        "|" + " --- |" * 16,
    ]
    for host in sorted({row["host"] for row in rows}):
        own = [row for row in rows if row["host"] == host]
        begun = [row for row in own if row["stages"]["alone"][0] == "accepted"]
        ends = Counter(_end(row) for row in begun)
        silent = sum(len(row.get("silent", ())) for row in begun)
        refusals = [stage[1] for row in begun for stage in row["stages"].values() if stage[0] == "refused"]
        slowest = f"{max(refusals):.1f} s" if refusals else "none"
        found = [row["stages"]["search"] for row in begun if "search" in row["stages"]]
        times = sorted(stage[1] for stage in found if stage[0] == "planned")
        spread = f"{statistics.median(times):.1f} s, at most {times[-1]:.1f} s" if times else "none"
        lines.append(
            f"| {host} | {_count(own)} | {_count(begun)} | {len(times)} | {_planned(begun)} | {ends['refused']} "
            f"| {ends['bad']} | {silent} | {slowest} | {spread} | {_trained(own)} |"
        )
    return "\n".join(lines) + "\n"


def _planned(rows: list[Row]) -> str:
    """Return how many have a plan whose arguments the host accepts, and how many of these have two."""
    own = [row for row in rows if _end(row) == "planned"]
    return f"{len(own)} ({sum('lean plan' in row['stages'] for row in own)})"


def _count(rows: list[Row]) -> str:
    """Return how many sets of flags there are, and how many scripts they stand for."""
    return f"{len(rows)} ({sum(row['scripts'] for row in rows)})"


def _trained(rows: list[Row]) -> str:
    """Return cells: how many train in one process, by every plan with its losses, as native flags do, otherwise."""
    plans = [[run for name, run in row["trained"].items() if name != "alone"] for row in rows if _trains(row)]
    ends = Counter(max(map(_likeness, own), default=0) for own in plans)
    equal = [run["difference"] for own in plans for run in own if _likeness(run) == 0]
    largest = f"{max(equal):.1e}" if equal else "none"
    runs = [run for row in rows for run in row.get("trained", {}).values()]
    shared = sum("as" in run for run in runs)
    return (
        f"{len(plans)} of {sum('trained' in row for row in rows)} | {ends[0]} | {ends[1]} | {ends[2]} | {largest} "
        f"| {len(runs) - shared}, {shared}"
    )


def _trains(row: Row) -> bool:
    one = row.get("trained", {}).get("alone", {})
    return "error" not in one and one.get("steps", 0) > 0


def _likeness(run: Row) -> int:
    """Return 0 for the losses of one process, 1 for those of native flags, 2 for others or none."""
    if run.get("difference") is None:
        return 2
    return 0 if run["difference"] <= TOLERANCE else 1 if run.get("native", 1.0) <= TOLERANCE else 2


def _end(row: Row) -> str:
    ends = {name: stage[0] for name, stage in row["stages"].items() if name != "alone"}
    if any(end in _BAD for end in ends.values()):
        return "bad"
    plans = ("plan", "lean plan") if kept_rows.depth(row) else ("plan",)
    return "planned" if all(ends.get(name) == "accepted" for name in plans) else "refused"


def _by_reason(rows: list[Row]) -> str:
    """List why trainings do not start, and why they are refused."""
    reasons: Counter[tuple[str, str]] = Counter()
    for row in rows:
        reasons.update(
            {
                ("by the host" if name == "alone" else "by this package", line)
                for name, (end, _, *lines) in row["stages"].items()
                for line in lines
                if end in ("refused", *_BAD)
            }
        )
    lines = ["| refused | the line, shortened | sets of flags |", "| --- | --- | --- |"]
    often = reasons.most_common(_REASONS)
    lines += [f"| {who} | {line} | {number} |" for (who, line), number in often]
    lines.append(
        f"| by either | {len(reasons) - len(often)} other lines | {reasons.total() - sum(n for _, n in often)} |"
    )
    return "\n".join(lines) + "\n"
