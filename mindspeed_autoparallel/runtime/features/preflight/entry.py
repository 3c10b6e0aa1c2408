"""``--auto-parallel-preflight`` from the host's parsed arguments to the report; then the process ends."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from mindspeed_autoparallel.files import made_folder, write_json_atomic
from mindspeed_autoparallel.interrupts import leaving_kept
from mindspeed_autoparallel.profiles.preflight_result import EXIT_CODES, PreflightResult, RankReport, judge, num_covered
from mindspeed_autoparallel.profiles.records import json_of
from mindspeed_autoparallel.progress import show_progress
from mindspeed_autoparallel.report.preflight import render
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.features.preflight.request import PreflightRequest, read_request
from mindspeed_autoparallel.runtime.features.preflight.source import run_source
from mindspeed_autoparallel.runtime.launch.work_dir import only_one
from mindspeed_autoparallel.schedule import StepTimes, in_flight, make_program, simulate
from mindspeed_autoparallel.units import MIB

RESULT_FILE = "preflight_result.json"


def conclude(request: PreflightRequest, ranks: Sequence[RankReport]) -> PreflightResult:
    """Return the results of ``ranks`` with the verdict, the replayed step and advice."""
    limit = request.limit_bytes
    verdict, text = judge(ranks, limit, request.limit_source, request.layout.num_devices)
    replay_us, note = _replay(request, ranks)
    return PreflightResult(
        layout=request.layout.label(),
        world_size=request.layout.num_devices,
        plan=str(request.plan_path or ""),
        device=current_device().fingerprint()["device"],
        limit_bytes=limit,
        limit_source=request.limit_source,
        ranks=tuple(ranks),
        num_ranks_covered=num_covered(ranks),
        replay_us=replay_us,
        replay_note=note,
        predicted_us=request.plan.step.total_us if request.plan is not None else None,
        verdict=verdict,
        verdict_text=text,
        advice=_advice(request, ranks) if verdict == "runs_out" else (),
        samples_differ=request.samples_differ,
    )


def _replay(request: PreflightRequest, ranks: Sequence[RankReport]) -> tuple[float | None, str]:
    """Return the step time of the whole layout in microseconds, simulated from the measured passes, and a note."""
    layout = request.layout
    if layout.modules:
        return None, "encoders with layouts of their own: their phases are not replayed"
    rows: dict[str, list[float]] = {"F": [0.0] * layout.num_virtual_stages, "B": [0.0] * layout.num_virtual_stages}
    by_rank = {report.pipeline_rank: report.run for report in ranks if report.run.passes}
    missing = sorted(set(range(layout.pipeline_size)) - set(by_rank))
    for rank, run in by_rank.items():
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for item in run.passes:
            times[item.kind, item.chunk].append(item.us)
        for (kind, chunk), values in times.items():
            if chunk >= layout.virtual_size:
                return None, f"rank {run.rank} has {chunk + 1} model chunks, the layout {layout.virtual_size} per rank"
            rows[kind][chunk * layout.pipeline_size + rank] = statistics.median(values)
    if missing:
        return None, f"stages {', '.join(map(str, missing))} were not run"
    program = make_program(*layout.program_sizes(request.num_microbatches))
    step = simulate(program, StepTimes(forward=rows["F"], backward=rows["B"]), rendezvous=True)
    optimizer_us = max(run.optimizer_us for run in by_rank.values())
    total = float(step.step_time) + optimizer_us
    return total, "passes and the slowest optimizer step as measured; without communication, which returns at once here"


def _advice(request: PreflightRequest, ranks: Sequence[RankReport]) -> tuple[str, ...]:
    """Return changes that lower the peak of the fullest rank, with its measured figures."""
    layout = request.layout
    report = max(ranks, key=lambda item: item.run.peak_bytes)
    run = report.run
    lines = [] if run.peak_place == "optimizer step" else _recompute_advice(request, report)
    if layout.micro_batch_size > 1 and run.peak_bytes:
        lines.append(
            f"micro batch {layout.micro_batch_size // 2} in place of {layout.micro_batch_size}: about half of the "
            f"{(run.peak_bytes - run.resident_bytes) / MIB:.1f} MiB that a step adds"
        )
    if not layout.distributed_optimizer and layout.data_size > 1:
        lines.append(
            f"--use-distributed-optimizer: optimizer state is split over {layout.data_size} replicas; "
            f"{run.resident_bytes / MIB:.1f} MiB are held between steps"
        )
    lines.append("larger TP or PP: a rank holds less of the model; --auto-parallel-mm searches for a plan that fits")
    return tuple(lines)


def _recompute_advice(request: PreflightRequest, report: RankReport) -> list[str]:
    run, over = report.run, report.run.peak_bytes - request.limit_bytes
    if not run.layer_bytes or over <= 0:
        return []
    program = make_program(*request.layout.program_sizes(request.num_microbatches))
    flights = max(1, -(-in_flight(program)[report.pipeline_rank] // request.layout.virtual_size))
    kept = statistics.median(run.layer_bytes.values()) * flights
    if kept * len(run.layer_bytes) < over:
        return [
            f"recompute alone does not suffice: the {len(run.layer_bytes)} layers keep about "
            f"{kept * len(run.layer_bytes) / MIB:.1f} MiB, and {over / MIB:.1f} MiB are too much"
        ]
    count = -(-over // max(1, int(kept)))
    return [
        f"full recompute of {count} more of {len(run.layer_bytes)} layers: each keeps about {kept / MIB:.2f} MiB for "
        f"{flights} microbatches in flight"
    ]


def _write(output_dir: Path, result: PreflightResult) -> None:
    """Write ``preflight_result.json`` and print the report."""
    target = output_dir / RESULT_FILE
    write_json_atomic(target, json_of(result))
    print(render(result), flush=True)
    print(f"written: {target}", flush=True)


def run_and_exit(arguments: argparse.Namespace) -> None:
    """Run the ranks, report, and end the process: training does not start."""
    show_progress("pre-flight")
    request = read_request(arguments)
    report_and_exit(request.work_dir, request.output_dir, lambda: conclude(request, run_source(request)))


def report_and_exit(work_dir: Path, output_dir: Path, find: Callable[[], PreflightResult]) -> NoReturn:
    """Write and print the result that ``find`` returns, and end the process."""
    made_folder(output_dir, "--auto-parallel-output-dir")
    with leaving_kept(f"results of finished ranks are in {work_dir}"):
        with only_one(work_dir, "--auto-parallel-work-dir"):
            result = find()
        _write(output_dir, result)
    sys.exit(EXIT_CODES[result.verdict])
