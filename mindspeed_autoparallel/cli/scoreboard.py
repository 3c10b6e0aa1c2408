"""Compare predictions with measured runs: time and memory error, rank correlation, regret, top-three hits.

DATA.json holds {"rows": [...]} with model, hw, parallel, train and measured in each; see docs/predict.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.answers import GroupErrors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("data", type=Path, metavar="DATA.json", help="measured rows")
    add("--json", action="store_true", help="print JSON only")


def _lines(group: str, entry: GroupErrors) -> list[str]:
    lines = []
    for title, e in (
        ("step time", entry.get("step_time")),
        ("peak memory", entry.get("peak_memory")),
        ("peak memory > 10 GiB", entry.get("peak_memory_above_10_gib")),
        ("activations", entry.get("activation_memory")),
        ("parameters+optimizer", entry.get("parameter_memory")),
    ):
        if e is not None:
            lines.append(
                f"{group:24s} {title:22s} {e['rows']:5d} {e['mean_absolute']:10.2%} {e['mean']:10.2%} "
                f"{e['worst_under']:10.2%} {e['worst_over']:10.2%}"
            )
    ranking = entry.get("ranking")
    if ranking and ranking["groups"]:
        lines.append(
            f"{group:24s} ranking: best in top three {ranking['top3_hits']}/{ranking['groups']} groups "
            f"({ranking['top3_hits_above_three']}/{ranking['groups_above_three']} with more than three plans), regret "
            f"{ranking['mean_regret']:.2%} mean {ranking['max_regret']:.2%} max, "
            f"rank correlation {ranking['mean_rank_correlation']:.3f}"
        )
    return lines


def run(arguments: argparse.Namespace) -> int:
    """Print every figure by group, and the omitted rows."""
    from mindspeed_autoparallel.files import read_json
    from mindspeed_autoparallel.predict.scoreboard import scoreboard

    document = read_json(arguments.data, "measured data")
    rows = document.get("rows") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f'{arguments.data} must hold {{"rows": [...]}} with one object per measured run.')
    result = scoreboard(rows)
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(
        f"{'group':24s} {'figure':22s} {'rows':>5s} {'mean_abs':>10s} {'mean':>10s} "
        f"{'most_under':>10s} {'most_over':>10s}"
    )
    for group, entry in result["groups"].items():
        print("\n".join(_lines(group, entry)))
    if result["left_out"]:
        print("left out:")
        for reason, count in result["left_out"].items():
            print(f"  {count:5d}  {reason}")
    return 0
