"""Replay a plan: step time, memory and timeline, also after editing the file.

simulate --plan plan.json --trace trace.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.units import gib

if TYPE_CHECKING:
    from mindspeed_autoparallel.spec import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plan", type=Path, required=True, help="plan.json, as searched or edited")
    parser.add_argument("--trace", type=Path, help="write the timeline here, in Chrome's trace format")
    parser.add_argument("--json", action="store_true", help="print only JSON")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.files import write_json_atomic
    from mindspeed_autoparallel.planner.replay import replay
    from mindspeed_autoparallel.spec import Plan, to_json

    before = Plan.read(arguments.plan)
    plan, found = replay(before)
    if arguments.trace is not None:
        from mindspeed_autoparallel.report.trace import chrome_trace

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
    print_plan(plan)
    print(f"the file says {before.step.total_us / 1000:.3f} ms; fits: {'yes' if found.fits else 'no'}")
    return 0


def print_plan(plan: Plan, tokens: float | None = None) -> None:
    """Print the answer, one line per stage, then the step and what limits it. ``tokens``: of the whole training."""
    from mindspeed_autoparallel.report.answer import answer_lines
    from mindspeed_autoparallel.report.stages import end_alone
    from mindspeed_autoparallel.report.virtual_stages import group_sizes
    from mindspeed_autoparallel.spec.plan import EDITED

    for line in answer_lines(plan, tokens):
        print("".join(c if c.isprintable() else "?" for c in line))
    print(f"{plan.layout.label()}, {plan.num_microbatches} microbatches")
    if plan.profile.source == "analytic":
        print("analytic: " + " ".join(plan.profile.notes))
    print("stage  forward_ms  backward_ms  peak_GiB  layers (recomputed)")
    for stage in plan.stages:
        cells = []
        for name, count in stage.layers.items():
            if count:
                again = sum(stage.recompute.get(name, {}).values())
                first = stage.first_layer[name]
                cells.append(f"{name} {first}-{first + count - 1} ({again})")
        peak = gib(plan.memory[stage.pipeline_rank].peak_bytes)
        print(
            f"{stage.stage:5d}  {stage.forward_us / 1000:10.2f}  {stage.backward_us / 1000:11.2f}  {peak:8.2f}  "
            + ", ".join(cells or [end_alone(stage)])
        )
    hetero = plan.hetero
    for phase in hetero.encoders if hetero is not None else ():
        print(
            f"{phase.module} {phase.layout.label()}: {phase.num_macro_batches} batches of {phase.samples} samples, "
            f"forward {phase.forward_us / 1000:.2f} ms, backward {phase.backward_us / 1000:.2f}, redistribution "
            f"{phase.exchange_us / 1000:.2f}, gradients and optimizer "
            f"{(phase.reduction_us + phase.optimizer_us) / 1000:.2f} "
        )
    step = plan.step
    print(
        f"step {step.total_us / 1000:.3f} ms (pipeline {step.pipeline_us / 1000:.3f}, gradients "
        f"{step.data_parallel_us / 1000:.3f}, optimizer {step.optimizer_us / 1000:.3f}), bubble "
        f"{step.bubble_fraction:.1%}, {plan.throughput_tokens_per_s_per_device:.1f} tokens/s/device"
    )
    if step.p50_us is not None and step.p95_us is not None:
        print(
            f"varying data: mean of steps {step.total_us / 1000:.3f} ms, P50 {step.p50_us / 1000:.3f}, "
            f"P95 {step.p95_us / 1000:.3f}"
        )
    for baseline in plan.baselines:
        if baseline.step_us is not None:
            print(f"{baseline.title}: {baseline.step_us / 1000:.2f} ms {baseline.note}".rstrip())
    if plan.search.status == EDITED:
        print("edited by hand: what was proved and compared when it was searched does not hold for this plan")
    else:
        _print_proof(plan)
    if text := group_sizes(plan):
        print(text)
    for limit in plan.search.limits:
        print(f"limit: {limit}")
    for relaxation in plan.search.relaxations:
        if relaxation.gain_fraction is not None:
            print(f"with {relaxation.change}: {relaxation.gain_fraction:.2%} faster per sample")


def _print_proof(plan: Plan) -> None:
    print(
        f"{plan.search.status}: bound {plan.search.lower_bound_us / 1000:.3f} ms, gap {plan.search.gap_fraction:.3%}, "
        f"{plan.search.num_configurations} layouts, {plan.search.num_solved} solved, {plan.search.seconds:.1f} s"
    )
