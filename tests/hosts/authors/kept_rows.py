"""Rows of the campaign as the repository keeps them: one JSON line for each host, program and set of flags."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
TOLERANCE = 1e-6
"""Of relative differences between losses."""


def digest(program: str, words: Iterable[str]) -> str:
    """Return what names the set of flags of ``words``: their values do not count."""
    names = sorted({word.partition("=")[0] for word in words if word.startswith("--")})
    return hashlib.sha256(" ".join([program, *names]).encode()).hexdigest()[:12]


def read(file: Path) -> dict[tuple[str, str], Row]:
    """Return rows by host and digest; of a training that was tried again the last row counts."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {(row["host"], row["flags"]): row for row in map(json.loads, lines)}


def depth(row: Row) -> int:
    """Return how far a row goes: 0 as far as a plan, 1 through every stage, 2 through trainings, or its host refuses it."""
    if "trained" in row or row["stages"]["alone"][0] != "accepted":
        return 2
    return int("tuning" in row["stages"])


def add(file: Path, row: Row) -> None:
    """Append ``row``, so that a campaign that is interrupted goes on behind it."""
    with file.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def sort(file: Path) -> None:
    """Write rows in the order of their names, one for each training."""
    rows = sorted(read(file).items())
    file.write_text("".join(json.dumps(row) + "\n" for _, row in rows))


def compact(row: Row, commit: str) -> Row:
    """Return what is kept of a row of ``stages``: how each stage ended, seconds, and the line where it did not end well."""
    stages = {name: _end(stage) for name, stage in row["stages"].items()}
    kept = {name: row[name] for name in ("host", "flags", "source", "scripts", "program", "devices")}
    silent = sorted({flag for stage in row["stages"].values() for flag in stage.get("silent", ())})
    trained = {"trained": {name: _run(run) for name, run in row["trained"].items()}} if "trained" in row else {}
    return {**kept, "commit": commit, "stages": stages, **({"silent": silent} if silent else {}), **trained}


def _end(stage: Row) -> list[object]:
    line = short(stage["line"])
    return [stage["end"], stage["seconds"], *([line] if line else [])]


def _run(run: Row) -> Row:
    kept = {"layout": run["layout"]} if "layout" in run else {}
    kept |= {name: float(f"{run[name]:.2g}") for name in ("difference", "native") if run.get(name) is not None}
    kept |= {"steps": run["steps"]} if run["steps"] else {}
    if "as" in run:
        return {**kept, "as": run["as"]}
    kept |= {"key": run["key"]} if "key" in run else {}
    kept |= {"losses": run["losses"]} if "key" in run and "layout" not in run else {}  # others are compared with them
    return {**kept, "seconds": run["seconds"], **({"error": short(run["error"])} if run["error"] else {})}


def short(line: str) -> str:
    """Return ``line`` without folders and figures, so that equal reasons are equal lines."""
    line = re.sub(r"^\S+\.py: error: ", "", line)
    line = re.sub(r" [('\"]?/\S+|\d+(\.\d+)?", lambda found: "" if "/" in found[0] else "N", line.replace("|", "/"))
    return line if len(line) <= 110 else line[:107] + "..."
