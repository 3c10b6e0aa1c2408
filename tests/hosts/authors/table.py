"""docs/hosts.md's tables of the authors' trainings, from rows of ``stages``."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_BEGIN, _END = "<!-- trainings of authors: generated -->\n", "<!-- end of trainings of authors -->\n"
_SEARCHES = ("measured search", "search", "lean search", "tuning")
_PLANS = ("plan", "lean plan")
_TOLERANCE = 1e-6
_REASONS = 10
"""Lines of refusals that are listed."""
_BAD = ("traceback", "timeout", "host")


def write(files: Iterable[Path], pages: Iterable[Path]) -> None:
    """Write the tables between their marks in ``pages``."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    # A training that was tried again counts once, as it ended last.
    rows = list({(row["host"], row["file"], *row["words"]): row for row in lines}.values())
    text = _by_host(rows) + "\n" + _by_reason(rows)
    for page in pages:
        content = page.read_text()
        begin, end = content.index(_BEGIN) + len(_BEGIN), content.index(_END)
        page.write_text(content[:begin] + "\n" + text + "\n" + content[end:])


def _by_host(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| host | scripts tried | arguments accepted by the host alone | searched | plan's arguments accepted "
        "| trained with the losses of one process | refused in a line | ended otherwise | a flag changed without a line "
        "| slowest refusal | from flag to plan, computed costs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for host in sorted({row["host"] for row in rows}):
        own = [row for row in rows if row["host"] == host]
        begun = [row for row in own if row["stages"]["alone"]["end"] == "accepted"]
        ends = Counter(_end(row) for row in begun)
        silent = sum(bool(stage.get("silent")) for row in begun for stage in row["stages"].values())
        refusals = [s["seconds"] for row in begun for s in row["stages"].values() if s["end"] == "refused"]
        slowest = f"{max(refusals):.1f} s" if refusals else "none"
        found = [row["stages"]["search"] for row in begun if row["stages"].get("search", {}).get("end") == "planned"]
        times = sorted(stage["seconds"] for stage in found)
        spread = f"{statistics.median(times):.1f} s, at most {times[-1]:.1f} s" if times else "none"
        lines.append(
            f"| {host} | {_count(own)} | {_count(begun)} | {len(found)} | {ends['planned']} | {_trained(own)} "
            f"| {ends['refused']} | {ends['bad']} | {silent} | {slowest} | {spread} |"
        )
    return "\n".join(lines) + "\n"


def _count(rows: list[dict[str, Any]]) -> str:
    """Return how many trainings differ, and how many scripts they stand for."""
    return f"{len(rows)} ({sum(len(row['sources']) for row in rows)})"


def _trained(rows: list[dict[str, Any]]) -> str:
    """Return of how many trainings every plan had the losses of one process, of how many that were run."""
    runs = [list(row["trained"].values()) for row in rows if row.get("trained")]
    differences = [[plan["difference"] for plan in plans[1:]] for plans in runs]
    equal = [all(one is not None and one <= _TOLERANCE for one in own) for own in differences]
    return f"{sum(equal)} of {len(runs)}" if runs else "0"


def _end(row: dict[str, Any]) -> str:
    stages = {name: stage for name, stage in row["stages"].items() if name != "alone"}
    if any(stage["end"] in _BAD for stage in stages.values()):
        return "bad"
    return "planned" if all(stages.get(name, {}).get("end") == "accepted" for name in _PLANS) else "refused"


def _by_reason(rows: list[dict[str, Any]]) -> str:
    """List why trainings do not start, and why they are refused."""
    reasons: Counter[tuple[str, str]] = Counter()
    for row in rows:
        own = {
            ("by the host" if name == "alone" else "by this package", _short(stage["line"]))
            for name, stage in row["stages"].items()
            if stage["end"] in ("refused", *_BAD)
        }
        reasons.update(own)
    lines = ["| refused | the line, shortened | trainings |", "| --- | --- | --- |"]
    often = reasons.most_common(_REASONS)
    lines += [f"| {who} | {line} | {number} |" for (who, line), number in often]
    lines.append(
        f"| by either | {len(reasons) - len(often)} other lines | {reasons.total() - sum(n for _, n in often)} |"
    )
    return "\n".join(lines) + "\n"


def _short(line: str) -> str:
    line = re.sub(r"^\S+\.py: error: ", "", line)
    line = re.sub(r" \(?/\S+|\d+(\.\d+)?", lambda found: "" if "/" in found[0] else "N", line.replace("|", "/"))
    return line if len(line) <= 110 else line[:107] + "..."
