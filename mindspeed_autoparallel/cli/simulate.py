"""Replay a plan, searched or edited: step time, memory and timeline.

simulate --plan plan.json --trace trace.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--plan", type=Path, required=True, help="plan.json, as searched or edited")
    add("--trace", type=Path, help="write the timeline to this file, in Chrome's trace format")
    add("--json", action="store_true", help="print only JSON")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.files import write_json_atomic
    from mindspeed_autoparallel.planner.replay import replay
    from mindspeed_autoparallel.report import render_table
    from mindspeed_autoparallel.spec import Plan, to_json

    before = Plan.read(arguments.plan)
    plan, found = replay(before)
    if arguments.trace is not None:
        from mindspeed_autoparallel.report.replay import chrome_trace

        write_json_atomic(arguments.trace, chrome_trace(plan))
    if arguments.json:
        print(
            json.dumps(
                {
                    "step_time_ms": plan.step.total_us / 1000,
                    "planned_step_time_ms": before.step.total_us / 1000,
                    "step": to_json(plan.step),
                    "throughput": plan.throughput_tokens_per_s_per_device,
                    "fits": found.fits,
                    "peak_memory_mib": [rank.peak_bytes / 2**20 for rank in plan.memory],
                    "stages": to_json(plan.stages),
                    "critical_path": [[label, size / 1000] for label, size in found.simulated.critical_path],
                    "limits": list(plan.search.limits),
                }
            )
        )
        return 0
    print(render_table(plan), end="")
    print(f"the file has {before.step.total_us / 1000:.3f} ms; fits: {'yes' if found.fits else 'no'}")
    return 0
