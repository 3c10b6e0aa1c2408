"""Scores published runs written in other words, and with keys left out: answers that change, and errors that grow.

    python tests/benchmarks/prediction/reworded_rows.py ROWS.jsonl... [--only WORDS]

For each kind of model, device and precision it predicts the first run, without its container. A line has how many
requests a change applies to, how many are answered as before (same status and step time), the range of the new step time over
the old one, the mean error before and after, and one example of each status that changed.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from recipe_rows import family_of, request_of

from mindspeed_autoparallel.cost.analytic.spellings import ALIASES
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.scoreboard import measured_step_ms

Change = Callable[[dict[str, Any]], bool]
"""Changes a request in place; returns whether it did."""
_PRECISIONS = {
    "bf16": ("BF16", "bf16_mixed"),
    "fp8": ("FP8-CS", "fp8_hybrid"),
    "mxfp8": ("fp8_mx", "MXFP8"),
    "nvfp4": ("NVFP4", "nv-fp4"),
}
_OPTIONAL = (
    *(("hw", "gpus_per_node"), ("parallel", "vpp"), ("parallel", "etp"), ("parallel", "pipeline_layout")),
    *(("parallel", "account_for_embedding"), ("parallel", "account_for_loss"), ("model", "type")),
    *(("model", "tied_embeddings"), ("model", "vocab"), ("model", "head_size"), ("model", "mtp_layers")),
    *(("model", "expert_bias"), ("model", "num_dense_layers"), ("model", "mamba"), ("train", "recompute")),
    *(("train", "overlap_grad_reduce"), ("train", "tp_comm_overlap")),
)


def without(section: str, key: str) -> Change:
    """Leave out a key."""
    return lambda request: request[section].pop(key, None) is not None


def renamed(section: str, place: int) -> Change:
    """Give every key of a section another of its names."""

    def change(request: dict[str, Any]) -> bool:
        others: dict[str, list[str]] = {}
        for name, own in ALIASES[section].items():
            others.setdefault(own, []).append(name)
        values = request[section]
        request[section] = {
            others[key][place % len(others[key])] if key in others else key: value for key, value in values.items()
        }
        return request[section].keys() != values.keys()

    return change


def respelled(place: int) -> Change:
    """Write the precision in the words of recipes."""

    def change(request: dict[str, Any]) -> bool:
        request["train"]["precision"] = _PRECISIONS[request["train"]["precision"]][place]
        return True

    return change


def stated(section: str, **values: object) -> Change:
    """State keys."""
    return lambda request: request[section].update(values) is None


CHANGES: Mapping[str, Change] = {
    **{f"{section}: other names, {place}": renamed(section, place) for section in ALIASES for place in (0, 1)},
    **{f"precision respelled, {place}": respelled(place) for place in (0, 1)},
    "parallel.vpp and fsdp 0": lambda request: (
        request["parallel"].update({key: 0 for key in ("vpp", "fsdp") if key not in request["parallel"]}) is None
    ),
    "sp and dist_opt stated": stated("parallel", sp=True, dist_opt=True),
    "train.moe_a2a_overlap stated": stated("train", moe_a2a_overlap=True),
    **{f"without {section}.{key}": without(section, key) for section, key in _OPTIONAL},
}


def report(name: str, change: Change, asked: list[tuple[dict[str, Any], Any, float]]) -> str:
    """Return a line on ``change``; ``asked``: requests with their answers and the measured step times."""
    same, ratios, errors, examples = 0, [], [], {}
    for request, before, measured in asked:
        other = copy.deepcopy(request)
        if not change(other):
            continue
        after = predict_one(other)
        if before["status"] != after["status"]:
            examples[f"{before['status']} to {after['status']}"] = f"{request['id']}: {after.get('reason', '')[:120]}"
        if "step_time_ms" in before and "step_time_ms" in after:
            ratios.append(after["step_time_ms"] / before["step_time_ms"])
            errors.append([abs(answer["step_time_ms"] / measured - 1) for answer in (before, after)])
            same += before["status"] == after["status"] and abs(ratios[-1] - 1) < 1e-9
    if not ratios:
        return f"{name:36s}    0  {examples}"
    first, last = np.mean(errors, axis=0)
    return (
        f"{name:36s} {len(ratios):4d}  same {same:4d}  ratio {min(ratios):5.2f} to {max(ratios):5.2f}  "
        f"error {first:6.1%} to {last:6.1%}  {examples or ''}"
    )


def main() -> None:
    """Ask every change and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--only", default="", help="part of the names of changes")
    arguments = parser.parse_args()
    rows = [json.loads(text) for path in arguments.rows for text in path.read_text().splitlines() if text.strip()]
    kinds: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        kinds.setdefault((family_of(row), row["hw"]["gpu"], row["train"]["precision"]), row)
    asked = []
    for row in kinds.values():
        request, measured = request_of(row, software=False), measured_step_ms(row)
        answer = predict_one(request)
        if measured and answer["status"] != "error":
            asked.append((request, answer, measured))
    for name, change in CHANGES.items():
        if arguments.only in name:
            print(report(name, change, asked), flush=True)


if __name__ == "__main__":
    main()
