"""Scores predictions on published runs of one JSON object a line: error by device, precision and kind of model, and how
many runs that ran are called out of memory.

    python tests/benchmarks/prediction/recipe_rows.py ROWS.jsonl... [--each] [--json OUT.json]

A row has ``id``, ``model``, ``hw``, ``parallel``, ``train`` and ``measured``. It is predicted as it is written, overlaps on
and nothing recomputed where the row states neither. A run called out of memory counts as a false one; its time is then
that of the first of selective and full recompute that fits (of full where none does).
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_autoparallel.cost.analytic.spellings import container_of
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.scoreboard import measured_step_ms

_OVERLAPS = ("overlap_grad_reduce", "tp_comm_overlap")
_LAUNCH_SCRIPTS = {
    "dgxc-benchmarking@f041145 deepseek_v3": {
        "software": "nemo-25.04",
        "recompute": "selective",
        "recompute_modules": ["core_attn"],
    }
}
"""What launch scripts state for GB200 that their pages do not; every recipe of that commit names container 25.04."""
_MORE_RECOMPUTE = {"none": ("selective", "full"), "selective": ("full",), "full": ()}


@dataclass(frozen=True, kw_only=True)
class Score:
    """One row and its prediction; without ``reason`` it was answered."""

    row: Mapping[str, Any]
    reason: str = ""
    ratio: float = 1.0
    """Predicted over measured step time."""
    held: bool = False
    """Whether the interval holds the measured time."""
    half_width: float = 0.0
    kind: str = ""
    called_out_of_memory: bool = False
    peak_gib: float = 0.0


def software_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the container of a row's source, and what the launch script beside its page sets."""
    source = row["source"]
    for page, stated in _LAUNCH_SCRIPTS.items():
        if page in source and row["hw"]["gpu"] == "GB200":
            return stated
    named = "nemo-25.04" if "dgxc-benchmarking@f041145" in source else container_of(source)
    return {"software": named} if named else {}


def request_of(row: Mapping[str, Any], software: bool = True) -> dict[str, Any]:
    """Return the request that a row is scored by; ``software``: with the container that it ran in."""
    train = {"recompute": "none", **dict.fromkeys(_OVERLAPS, True), **row["train"]}
    if software:
        train |= software_of(row)
    return {**{key: row[key] for key in ("id", "model", "hw", "parallel")}, "train": train}


def score(row: Mapping[str, Any], software: bool = True) -> Score:
    """Return how far the prediction of ``row`` is off."""
    request = request_of(row, software)
    first = answer = predict_one(request)
    if answer["status"] == "error":
        return Score(row=row, reason=answer["reason"])
    for recompute in _MORE_RECOMPUTE[request["train"]["recompute"]]:
        if answer["status"] == "ok":
            break
        answer = predict_one({**request, "train": {**request["train"], "recompute": recompute}})
    measured = measured_step_ms(row)
    assert measured
    low, high = answer["step_time_interval_ms"]
    return Score(
        row=row,
        ratio=answer["step_time_ms"] / measured,
        held=low <= measured <= high,
        half_width=(high - low) / 2 / answer["step_time_ms"],
        kind=answer["step_time_extrapolation"],
        called_out_of_memory=first["status"] == "out_of_memory",
        peak_gib=first["peak_memory_gib"],
    )


def family_of(row: Mapping[str, Any]) -> str:
    """Return what kind of model a row trains."""
    model, train = row["model"], row["train"]
    if train.get("task"):
        return "tuning on examples"
    if model.get("layer_pattern"):
        return "hybrid"
    if model.get("mla"):
        return "MLA + experts"
    return "experts" if model.get("num_experts") else "dense"


_AXES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "device": lambda row: str(row["hw"]["gpu"]),
    "precision": lambda row: str(row["train"].get("precision", "bf16")),
    "model": family_of,
    "nodes": lambda row: "one node" if row["hw"]["num_gpus"] <= row["hw"].get("gpus_per_node", 8) else "several",
}


def line(name: str, scores: Sequence[Score]) -> str:
    """Return errors, false calls and intervals of ``scores`` in one line."""
    ratio = np.array([item.ratio for item in scores])
    error = np.abs(ratio - 1)
    false = sum(item.called_out_of_memory for item in scores)
    return (
        f"{name:28s} {len(scores):4d}  mean {error.mean():6.1%}  median {np.median(error):6.1%}  "
        f"P90 {np.quantile(error, 0.9):6.1%}  bias {np.exp(np.log(ratio).mean()):5.2f}  false OOM {false:3d} "
        f"({false / len(scores):4.0%})  held {np.mean([item.held for item in scores]):4.0%}  "
        f"half width {np.median([item.half_width for item in scores]):4.0%}"
    )


def main() -> None:
    """Score every row and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--without-software", action="store_true", help="leave out the container that a source names")
    parser.add_argument("--each", action="store_true", help="print every row")
    parser.add_argument("--json", type=Path, help="where ratios by row are written")
    arguments = parser.parse_args()
    rows = [json.loads(text) for path in arguments.rows for text in path.read_text().splitlines() if text.strip()]
    scores = [score(row, not arguments.without_software) for row in rows]
    answered = [item for item in scores if not item.reason]
    print(f"answered {len(answered)} of {len(rows)}")
    for reason, count in collections.Counter(item.reason for item in scores if item.reason).most_common():
        print(f"  {count:3d}  {reason}")
    print(line("all", answered))
    for axis, of in _AXES.items():
        by: dict[str, list[Score]] = collections.defaultdict(list)
        for item in answered:
            by[of(item.row)].append(item)
        for name, found in sorted(by.items()):
            print(line(f"{axis}: {name}", found))
    if arguments.each:
        for item in sorted(answered, key=lambda item: item.ratio):
            mark = "OOM" if item.called_out_of_memory else "   "
            print(f"{item.ratio:6.2f} {mark} {item.peak_gib:7.1f} GiB  {item.row['id']}  {item.row['source'][:60]}")
    if arguments.json:
        arguments.json.write_text(json.dumps({item.row["id"]: item.ratio for item in answered}))


if __name__ == "__main__":
    main()
