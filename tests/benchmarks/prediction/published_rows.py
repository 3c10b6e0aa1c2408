"""Asks the predictor for every published row that states model, layout and device, and says how far it is off.

    python tests/benchmarks/prediction/published_rows.py DATA.json... [--each TABLE]

Printed: rows that are answered and the reasons of the others, errors of time by table (rows marked unusable left out),
errors of peaks by table and rank, how often intervals hold, and the time of 1,500 requests. Peaks that Megatron reports
once, after the first step, are compared with both the first step's and a later step's.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_autoparallel.cost.analytic.fields import part
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.measured_rows import SIZE_NAMES, request_of_row
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.scoreboard import measured_peak_gib, measured_step_ms

NUM_TIMED = 1500


def states_a_run(row: Mapping[str, object]) -> bool:
    """Return whether ``row`` has model, layout and device, so that it could be answered."""
    model, hardware, parallel, train = (part(row, name) for name in ("model", "hw", "parallel", "train"))
    sizes = {**model, **part(model, "config"), **part(row, "megatron_args")}
    named = all(any(sizes.get(name) for name in SIZE_NAMES[key]) for key in ("num_layers", "hidden", "heads", "seq"))
    layout = any(parallel.get(key) for key in ("tp", "pp", "dp", "fsdp"))
    batch = train.get("gbs") or train.get("micro_batch_count")
    known = hardware.get("gpu") and "unknown" not in str(hardware["gpu"]) and isinstance(hardware.get("num_gpus"), int)
    return bool(named and layout and batch and known)


def asked(row: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None, str]:
    """Return a row's request, its answer, and the reason where there is none."""
    try:
        request = request_of_row(row)
    except ConfigError as error:
        return None, None, str(error)
    if request is None:
        return None, None, "the row does not describe a run in full"
    answer = predict_one(request)
    return (request, None, answer["reason"]) if answer["status"] == "error" else (request, answer, "")


def with_dates_of_figures(rows: list[dict[str, Any]]) -> None:
    """Give each row the date on which its peaks were first written down: baselines stay when their software goes on."""
    first: dict[Any, str] = {}
    for row in rows:
        key = row["id"].split("@")[0], str(row["measured"].get("peak_alloc_gib_per_rank"))
        date = row.get("source", {}).get("date")
        if date and row["measured"].get("peak_alloc_gib_per_rank"):
            first[key] = min(first.get(key, date), date)
            row["source"]["date"] = first[key]


def peaks(row: dict[str, Any], request: dict[str, Any], answer: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Return (predicted, predicted for the first step, measured) for every rank that was measured."""
    stages, by_rank = answer["stages"], row["measured"].get("peak_alloc_gib_per_rank")
    if by_rank:
        ranks = request["hw"]["num_gpus"] // len(stages)
        found = [(stages[int(rank) // ranks], peak) for rank, peak in by_rank.items() if peak]
    else:
        peak = measured_peak_gib(row)
        last = "mem_max_allocated_bytes" in row["measured"]
        worst = max(stages, key=lambda stage: stage["peak_memory_gib"])
        found = [(stages[-1] if last else worst, peak)] if peak else []
    return [(stage["peak_memory_gib"], stage["first_step_peak_gib"], peak) for stage, peak in found]


def line(name: str, ratio: np.ndarray) -> str:
    """Return one line of errors."""
    error = np.abs(ratio - 1)
    return (
        f"{name:44s} {len(error):4d}  mean {error.mean():6.1%}  median {np.median(error):6.1%}  "
        f"lowest {ratio.min() - 1:+.0%}  highest {ratio.max() - 1:+.0%}"
    )


def main() -> None:
    """Asks and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument(
        "--skip", action="append", default=[], help="tables whose times say nothing, such as tiny tests"
    )
    parser.add_argument("--each", action="append", default=[], help="tables whose rows are printed")
    arguments = parser.parse_args()
    rows = [row for path in arguments.data for row in json.loads(path.read_text())["rows"]]
    rows.sort(key=lambda row: str(row.get("source", {}).get("date") or ""))
    with_dates_of_figures(rows)
    stated = answered = 0
    reasons: collections.Counter[str] = collections.Counter()
    times, held, memory = (collections.defaultdict(list) for _ in range(3))
    requests = []
    for row in rows:
        table = row.get("table") or row["group"]
        request, answer, reason = asked(row)
        if states_a_run(row):
            stated, answered = stated + 1, answered + (answer is not None)
            if answer is None:
                reasons[f"{table}: {re.sub(r'[0-9]+', 'N', reason)[:100]}"] += 1
        if request is None or answer is None:
            continue
        requests.append(request)
        step = measured_step_ms(row)
        if step and not row.get("time_unusable") and table not in arguments.skip:
            times[table].append((row["id"], answer["step_time_ms"], step))
            low, high = answer["step_time_interval_ms"]
            held[answer["device"], answer["step_time_extrapolation"]].append(low <= step <= high)
        memory[table] += peaks(row, request, answer)
    print(f"answered {answered} of {stated} rows that state model, layout, batch and device: {answered / stated:.1%}")
    for reason, count in reasons.most_common():
        print(f"  {count:4d}  {reason}")
    for table, found in sorted(times.items()):
        print(line(f"time   {table}", np.array([predicted / measured for _, predicted, measured in found])))
        if table in arguments.each:
            for name, predicted, measured in sorted(found, key=lambda item: item[1] / item[2]):
                print(f"    {predicted / measured:6.2f}  {measured:10.0f} ms  {name}")
    for (device, kind), inside in sorted(held.items()):
        print(f"interval {device}, {kind}: holds {sum(inside)} of {len(inside)} ({sum(inside) / len(inside):.0%})")
    for table, found in sorted((table, found) for table, found in memory.items() if found):
        values = np.array(found)
        print(line(f"peak   {table}", values[:, 0] / values[:, 2]))
        print(line(f"peak   {table}, first step", values[:, 1] / values[:, 2]))
        large = values[values[:, 2] > 10]
        if len(large):
            print(line(f"peak   {table}, above 10 GiB", large[:, 0] / large[:, 2]))
            print(line(f"peak   {table}, above 10 GiB, first step", large[:, 1] / large[:, 2]))
    begin, begin_of_process = time.perf_counter(), time.process_time()
    for number in range(NUM_TIMED):
        predict_one(requests[number * 7 % len(requests)])
    taken, own = time.perf_counter() - begin, time.process_time() - begin_of_process
    print(f"{NUM_TIMED} requests in {taken:.1f} s by the clock, {own:.1f} s of the processor")


if __name__ == "__main__":
    main()
