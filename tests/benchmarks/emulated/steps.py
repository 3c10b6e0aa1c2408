"""Predicted step times of the planner's plans against Megatron's own schedules on the emulated device.

python tests/benchmarks/emulated/steps.py                      virtual clock (about a minute)
python tests/benchmarks/emulated/steps.py --megatron FOLDER --sends overlapped    on an older megatron.core
python tests/benchmarks/emulated/steps.py --sleep              real sleeps on plain gloo; wants a quiet machine
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests/helpers"))

from emulated_device.cases import Case
from emulated_device.launching import run_on_emulated_device
from emulated_device.plans import WANTED, Planned, planned, predicted_activation_peaks

from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate

SCALE = 12
"""Of all times when sleeping: stages of some 200 ms, so that the host's own milliseconds are small beside them."""
REPEATS = 2


def predicted_ns(case: Case, *, operation_ns: float = 0.0, message_ns: float = 0.0, sends: str = "") -> float:
    """The simulator's step for a case; the planner's own call unless ``sends`` is given."""
    schedule = "interleaved" if case.virtual_size > 1 else "1f1b"
    program = make_program(schedule, case.pipeline_size, case.num_microbatches, case.virtual_size)
    times = StepTimes(
        forward=case.forward_ns,
        backward=case.backward_ns,
        link=case.link_ns,
        per_operation=operation_ns,
        per_message=message_ns,
    )
    return simulate(program, times, rendezvous=True, sends=sends).step_time


def virtual(plans: list[Planned], megatron: list[Path]) -> None:
    """The table of plans; every error against the device."""
    found = iter(run_on_emulated_device([case for item in plans for case in item.cases], megatron=megatron))
    print(
        "| plan | microbatches | recomputed | pipeline ms | device ms | error % | step ms | device ms | error % "
        "| eager error % | activations |"
    )
    print("| --- " * 11 + "|")
    errors: list[float] = []
    step_errors: list[float] = []
    eager_errors: list[float] = []
    release = ""
    for item in plans:
        outcomes = [next(found) for _ in item.cases]
        release = outcomes[0].release
        device = statistics.mean(outcome.pipeline_ns for outcome in outcomes) / 1e6
        device_step = statistics.mean(outcome.step_ns for outcome in outcomes) / 1e6
        pipeline, step = item.plan.step.pipeline_us / 1e3, item.plan.step.total_us / 1e3
        eager = statistics.mean(predicted_ns(case, sends="eager") for case in item.cases) / 1e6
        for kept, predicted, measured in (
            (errors, pipeline, device),
            (step_errors, step, device_step),
            (eager_errors, eager, device),
        ):
            kept.append((predicted / measured - 1) * 100)
        same = all(outcome.peak_bytes == predicted_activation_peaks(item) for outcome in outcomes)
        recomputed = sum(
            count for stage in item.plan.stages for kinds in stage.recompute.values() for count in kinds.values()
        )
        print(
            f"| {item.wanted.label} | {item.plan.num_microbatches} | {recomputed} | {pipeline:.3f} | {device:.3f} | "
            f"{errors[-1]:+.4f} | {step:.3f} | {device_step:.3f} | {step_errors[-1]:+.4f} | "
            f"{eager_errors[-1]:+.2f} | {'equal' if same else 'DIFFERENT'} |"
        )
    print(f"\nmegatron-core {release.split('+')[0]}, {len(plans)} plans")
    for name, kept in (("pipeline", errors), ("whole step", step_errors), ("pipeline, eager sends", eager_errors)):
        print(f"{name}: {_summary(kept)}")


def sleeping(plans: list[Planned], megatron: list[Path]) -> None:
    """Real time. Overheads of the host are calibrated on two cases that are no plans."""
    one = Case(
        pipeline_size=1,
        num_microbatches=20,
        forward_ns=[[20_000_000] * 20],
        backward_ns=[[40_000_000] * 20],
        link_ns=[],
        sleeping=True,
    )
    four = Case(
        pipeline_size=4,
        num_microbatches=20,
        forward_ns=[[5_000_000] * 20] * 4,
        backward_ns=[[10_000_000] * 20] * 4,
        link_ns=[0] * 3,
        sleeping=True,
    )
    chosen = [item for item in plans if not item.wanted.variable]
    cases = [_slowed(item.cases[0]) for item in chosen]
    found = iter(
        run_on_emulated_device(
            [case for case in (one, four, *cases) for _ in range(REPEATS)], megatron=megatron, timeout_s=580
        )
    )
    # The least: what other work on the machine adds is no property of the schedule.
    measured = [min(next(found).pipeline_ns for _ in range(REPEATS)) for _ in (one, four, *cases)]
    operation_ns = (measured[0] - predicted_ns(one)) / 40
    low, high = 0.0, 20e6
    for _ in range(40):
        middle = (low + high) / 2
        if predicted_ns(four, operation_ns=operation_ns, message_ns=middle) < measured[1]:
            low = middle
        else:
            high = middle
    print(f"calibrated: {operation_ns / 1e6:.3f} ms per operation, {low / 1e6:.3f} ms per message\n")
    print("| plan | microbatches | predicted ms | measured ms | error % | without overheads % |")
    print("| --- " * 6 + "|")
    errors, plain = [], []
    for item, case, real in zip(chosen, cases, measured[2:], strict=True):
        predicted = predicted_ns(case, operation_ns=operation_ns, message_ns=low)
        errors.append((predicted / real - 1) * 100)
        plain.append((predicted_ns(case) / real - 1) * 100)
        print(
            f"| {item.wanted.label} | {case.num_microbatches} | {predicted / 1e6:.1f} | {real / 1e6:.1f} | "
            f"{errors[-1]:+.2f} | {plain[-1]:+.2f} |"
        )
    print(f"\n{len(chosen)} plans, least of {REPEATS} steps each: {_summary(errors)}")
    print(f"without calibrated overheads: {_summary(plain)}")


def _slowed(case: Case) -> Case:
    return replace(
        case,
        sleeping=True,
        link_ns=[0] * len(case.link_ns),
        before_sync_ns=[],
        after_sync_ns=[],
        forward_ns=[[SCALE * value for value in row] for row in case.forward_ns],
        backward_ns=[[SCALE * value for value in row] for row in case.backward_ns],
    )


def _summary(errors: list[float]) -> str:
    return f"mean error {statistics.mean(map(abs, errors)):.4f} %, worst {max(map(abs, errors)):.4f} %"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleep", action="store_true", help="sleep in real time")
    parser.add_argument("--megatron", type=Path, action="append", default=[], help="folder of another megatron.core")
    parser.add_argument("--sends", default="freed", help="interleaved_sends of the profile; overlapped before 2026")
    options = parser.parse_args()
    plans = [planned(wanted, options.sends) for wanted in WANTED]
    (sleeping if options.sleep else virtual)(plans, options.megatron)
