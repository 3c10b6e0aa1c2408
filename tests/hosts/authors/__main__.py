"""``python tests/hosts/authors CHECKOUT... --rows FILE``: try every training that the authors of checkouts ship.

Each is made small (``shrink``), and run as far as its checked arguments (``stages``): as its authors start it, then by
``--auto-parallel-mm``, ``--auto-tuning`` and ``--auto-parallel-plan``. ``--table FILE...`` writes the pages' tables.
What a checkout ships is collected once and kept beside the rows; a training with a row is not tried again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import collect
import shrink
import table

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests" / "hosts"), str(ROOT / "tests" / "helpers")]

from forked_host import environment, release_of  # noqa: E402


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--rows", type=Path, help="rows are added here, one JSON object a line")
    parser.add_argument("--path", default="", help="more folders for PYTHONPATH, separated by ':'")
    parser.add_argument("--only", default="", help="sources that match this expression")
    parser.add_argument("--first", type=int, default=0, help="the first of those without a row")
    parser.add_argument("--every", type=int, default=1, help="of the trainings that differ, each so many-th")
    parser.add_argument("--count", type=int, help="no more than so many")
    parser.add_argument("--by-flags", action="store_true", help="of those with the same set of flags, one")
    parser.add_argument("--train", action="store_true", help="train each by its plan for two devices as well")
    parser.add_argument("--table", nargs="+", type=Path, help="write the tables of docs/hosts.md from these rows")
    options = parser.parse_args()
    if options.checkouts and options.rows is None:
        parser.error("--rows is needed")
    for checkout in options.checkouts:
        _try(checkout.resolve(), options)
    if options.table:
        table.write(options.table, [ROOT / "docs" / "hosts.md", ROOT / "docs" / "zh" / "hosts.md"])


def _try(checkout: Path, options: argparse.Namespace) -> None:
    release = release_of([checkout, *map(Path, options.path.split(os.pathsep))])
    mindspeed = any((checkout / name).is_dir() for name in ("mindspeed_llm", "mindspeed_mm"))
    tasks = []
    for found in collect.kept(checkout, options.rows.with_suffix(f".{checkout.name}.trainings")):
        if re.search(options.only, found.source):
            small = shrink.shrink(found.words, release=release, mindspeed=mindspeed)
            tasks.append(
                {
                    "host": checkout.name,
                    "source": found.source,
                    "program": found.program,
                    "file": str(collect.checkout_file(found)),
                    "words": tuple(_placed(word, checkout) for word in small.words),
                    "replaced": small.replaced,
                    "processes": small.num_processes,
                    "devices": math.lcm(2 if options.train else 4, _context_size(small.words) if mindspeed else 1),
                    "keep_plans": options.train,
                }
            )
    variables = environment(checkout, options.path)
    # Many configurations differ in what is made small or left out alone: they are one training here.
    alike: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for task in tasks:
        alike.setdefault((task["file"], task["words"]), []).append(task)
    drawn = [rows[0] | {"sources": [row["source"] for row in rows]} for rows in alike.values()]
    if options.by_flags:
        drawn = _unlike(drawn)
    tried = {(row["file"], *row["words"], row["keep_plans"]) for row in _read(options.rows)}
    drawn = [row for row in drawn if (row["file"], *row["words"], row["keep_plans"]) not in tried]  # type: ignore[misc]
    drawn = drawn[options.first :: options.every][: options.count]
    worker = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("stages.py")), *["mindspeed"] * mindspeed]
    # From a file to a file: with pipes, each side would wait for the other once both are full.
    with tempfile.TemporaryFile("w+") as lines, options.rows.open("a") as rows:
        lines.writelines(json.dumps(task) + "\n" for task in drawn)
        lines.seek(0)
        subprocess.run(worker, stdin=lines, stdout=rows, env=variables, check=True)


def _read(rows: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.is_file() else []


def _context_size(words: tuple[str, ...]) -> int:
    """Return the size that MindSpeed keeps under every plan."""
    return int(shrink.flags_of(words).get("--context-parallel-size", ["1"])[0])


def _placed(word: str, checkout: Path) -> str:
    """Return a relative path of the checkout's as an absolute one: trainings run in folders of their own."""
    return str(checkout / word) if "/" in word and len(word) < 200 and (checkout / word).is_file() else word


def _unlike(tasks: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return one of the ``tasks`` for each program and set of flags, those first whose flags others have least."""
    sets: dict[tuple[object, ...], dict[str, object]] = {}
    for task in tasks:
        names = frozenset(word.partition("=")[0] for word in task["words"] if word.startswith("--"))  # type: ignore[attr-defined]
        sets.setdefault((task["file"], names), {**task, "flags": names})
    counts = Counter(name for task in sets.values() for name in task["flags"])  # type: ignore[attr-defined]
    chosen, seen = [], set()
    waiting = list(sets.values())
    # Each next one has the most flags that none before it had; with ties, the rarer ones.
    while waiting:
        best = max(waiting, key=lambda task: (len(task["flags"] - seen), -sum(counts[n] for n in task["flags"])))  # type: ignore[operator,attr-defined]
        waiting.remove(best)
        seen |= best.pop("flags")  # type: ignore[arg-type]
        chosen.append(best)
    return chosen


if __name__ == "__main__":
    main()
