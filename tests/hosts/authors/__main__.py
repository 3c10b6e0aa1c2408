"""``python tests/hosts/authors CHECKOUT...``: try the trainings that the authors of checkouts ship, one for each set of flags.

Each is made small (``shrink``), and run as far as its checked arguments (``stages``): as its authors start it, then by
``--auto-parallel-mm``, ``--auto-tuning`` and ``--auto-parallel-plan``; ``--train`` trains it as well. Rows are kept in
``rows.jsonl`` (``kept_rows``), and a training with a row is not tried again. Trainings are tried in an order of which every
first part is spread over all of them. What a checkout ships is collected once, into the folder of temporary files.
``--table`` writes the pages' tables.
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
import kept_rows
import shrink
import table

Task = dict[str, Any]

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests" / "hosts"), str(ROOT / "tests" / "helpers")]

import multimodal  # noqa: E402
from forked_host import environment, release_of  # noqa: E402


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--rows", type=Path, default=Path(__file__).with_name("rows.jsonl"), help="JSON lines")
    parser.add_argument("--name", help="of the host in its rows; the checkout's folder without it")
    parser.add_argument("--path", default="", help="more folders for PYTHONPATH, separated by ':'")
    parser.add_argument("--only", default="", help="sources that match this expression")
    parser.add_argument("--count", type=int, help="no more than so many of each checkout")
    parser.add_argument(
        "--brief", action="store_true", help="search by computed costs and check the plan's arguments alone"
    )
    parser.add_argument("--train", action="store_true", help="train each by its plan for two devices as well")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one training, in seconds (default 300)")
    parser.add_argument("--renew", action="store_true", help="try again what has a row of another commit")
    parser.add_argument("--table", action="store_true", help="write the tables of docs/hosts.md from the rows")
    options = parser.parse_args()
    for checkout in options.checkouts:
        _try(checkout.resolve(), options)
        kept_rows.sort(options.rows)
    if options.table:
        rows = list(kept_rows.read(options.rows).values())
        table.write(rows, [ROOT / "docs" / "hosts.md", ROOT / "docs" / "zh" / "hosts.md"])


def _try(checkout: Path, options: argparse.Namespace) -> None:
    release = release_of([checkout, *map(Path, options.path.split(os.pathsep))])
    mindspeed = any((checkout / name).is_dir() for name in ("mindspeed_llm", "mindspeed_mm"))
    host = options.name or checkout.name
    commit = _commit()
    tried = {
        flags
        for (of_host, flags), row in kept_rows.read(options.rows).items()
        if of_host == host
        and kept_rows.depth(row) >= (0 if options.brief else 2 if options.train else 1)
        and not (options.renew and row["commit"] != commit)
    }
    tasks = []
    for found in collect.kept(
        checkout, Path(tempfile.gettempdir()) / f"{host} {kept_rows.digest(str(checkout), ())}.trainings"
    ):
        if re.search(options.only, found.source):
            small = shrink.shrink(found.words, release=release, mindspeed=mindspeed)
            words = tuple(_placed(word, checkout) for word in small.words)
            if options.train:
                words = multimodal.with_tiny_model(words, found.program, checkout, Path(tempfile.gettempdir()))
            tasks.append(
                {
                    "host": host,
                    "flags": kept_rows.digest(found.program, small.words),
                    "source": found.source,
                    "program": found.program,
                    "file": str(collect.checkout_file(found)),
                    "words": words,
                    "processes": small.num_processes,
                    "devices": math.lcm(2 if options.train else 4, _context_size(small.words) if mindspeed else 1),
                    "keep_plans": options.train,
                    "brief": options.brief,
                    "limit_s": options.limit_s,
                }
            )
    drawn = [row for row in _spread(_unlike(tasks)) if row["flags"] not in tried][: options.count]
    variables = environment(checkout, options.path)
    worker = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("stages.py")), str(options.rows)]
    worker += ["mindspeed"] * mindspeed
    # From a file: with two pipes, each side would wait for the other once both are full.
    with tempfile.TemporaryFile("w+") as lines:
        lines.writelines(json.dumps(task) + "\n" for task in drawn)
        lines.seek(0)
        with subprocess.Popen(worker, stdin=lines, stdout=subprocess.PIPE, text=True, env=variables) as running:
            for line in running.stdout or ():
                kept_rows.add(options.rows, kept_rows.compact(json.loads(line), commit))
        if running.returncode:
            sys.exit(running.returncode)


def _commit() -> str:
    return subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"], text=True).strip()


def _context_size(words: tuple[str, ...]) -> int:
    """Return the size that MindSpeed keeps under every plan."""
    return int(shrink.flags_of(words).get("--context-parallel-size", ["1"])[0])


def _placed(word: str, checkout: Path) -> str:
    """Return a relative path of the checkout's as an absolute one: trainings run in folders of their own."""
    return str(checkout / word) if "/" in word and len(word) < 200 and (checkout / word).is_file() else word


def _unlike(tasks: list[Task]) -> list[Task]:
    """Return one of the ``tasks`` for each set of flags, those first whose flags others have least.

    Configurations often differ in values alone: they are one training here, and ``scripts`` is their number.
    """
    sets: dict[str, Task] = {}
    for task in tasks:
        sets.setdefault(task["flags"], {**task, "scripts": 0})["scripts"] += 1
    names = {key: frozenset(shrink.flags_of(task["words"])) for key, task in sets.items()}
    counts = Counter(name for own in names.values() for name in own)
    chosen: list[Task] = []
    seen: set[str] = set()
    # Each next one has the most flags that none before it had; with ties, the rarer ones.
    while names:
        best = max(names, key=lambda key: (len(names[key] - seen), -sum(counts[name] for name in names[key])))
        seen |= names.pop(best)
        chosen.append(sets[best])
    return chosen


def _spread(tasks: list[Task]) -> list[Task]:
    """Return ``tasks`` in the order of their places' bits read backwards: each first part is at about equal distances."""
    width = len(f"{len(tasks):b}")
    return [tasks[place] for place in sorted(range(len(tasks)), key=lambda place: int(f"{place:0{width}b}"[::-1], 2))]


if __name__ == "__main__":
    main()
