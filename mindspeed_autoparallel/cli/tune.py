"""Find the three fastest layouts that fit, by prediction alone, with the flags to paste.

FILE holds one request as for predict, with an empty or partial "parallel", whose values are fixed.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.cli import _launch, _plan_answer, _script
from mindspeed_autoparallel.cli._progress import code_after_interrupt, progress_of
from mindspeed_autoparallel.cost.analytic.fields import part
from mindspeed_autoparallel.errors import ConfigError, PlanError
from mindspeed_autoparallel.interrupts import Stopped

if TYPE_CHECKING:
    from mindspeed_autoparallel.cost.device import Device
    from mindspeed_autoparallel.predict.answers import Answer, Choice, DecisionAnswer, ExperimentAnswer, Tuning
    from mindspeed_autoparallel.predict.tuning import Tuned
    from mindspeed_autoparallel.spec import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add("--request", type=Path, required=True, metavar="FILE", help="JSON file with one request")
    add("--device-file", type=Path, action="append", default=[], help="file that describes a device (repeatable)")
    add(
        "--profile-source",
        choices=("analytic",),
        default="analytic",
        help="only analytic: this command measures nothing, unlike a script with --auto-tuning",
    )
    add(
        "--what-to-measure",
        action="store_true",
        help="print the figures that decide the choice, runs that would settle it, and the plan with the least regret",
    )
    add(
        "--time-limit-s",
        type=float,
        default=60.0,
        help="then end with the best plans so far and their gap (default: 60)",
    )
    add("--num-workers", type=int, default=0, help="processes (default: one per core); the plans do not depend on it")
    _plan_answer.add_tokens(parser)
    _script.add_argument(parser)
    add("--page", type=Path, metavar="FILE", help="write the page of the first plan to this file")
    add("--json", action="store_true", help="print JSON only")


_COMPARED = 20
"""Number of fastest plans that --what-to-measure compares."""


def _check_one_request(request: object, path: Path) -> None:
    """Raise ``ConfigError`` if the parsed file is not an object with the sections of a request."""
    names = ("model", "hw", "train")
    if isinstance(request, Mapping):
        missing = [name for name in names if not isinstance(request.get(name), Mapping)]
        if not missing:
            return
        listed = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        reason = f"; {listed} {'is' if len(missing) == 1 else 'are'} missing"
    else:
        reason = ", not a list" if isinstance(request, list) else ", not a value"
    raise ConfigError(f"{path} must be one request: an object with model, hw and train{reason}.")


def run(arguments: argparse.Namespace) -> int:
    """Search and print; exit code 3 if no plan fits."""
    from mindspeed_autoparallel.cost.catalogue import read_device
    from mindspeed_autoparallel.files import read_json
    from mindspeed_autoparallel.planner.layouts.options import SearchOptions
    from mindspeed_autoparallel.predict.tuning import tune
    from mindspeed_autoparallel.report.answer import answer_lines

    tokens = _plan_answer.tokens(arguments.tokens)
    _script.check(arguments)
    request = read_json(arguments.request, "request file")
    _check_one_request(request, arguments.request)
    devices = tuple(read_device(path) for path in arguments.device_file)
    options = SearchOptions(
        time_limit_s=arguments.time_limit_s,
        top_k=(_COMPARED if arguments.what_to_measure else 3) - 1,
        num_workers=arguments.num_workers,
        with_relaxations=False,
    )
    code = 0
    try:
        tuned = tune(request, devices, options, progress=progress_of(arguments))
    except Stopped as stopped:
        tuned, code = stopped.plan, code_after_interrupt(stopped, "plans")
    if arguments.script is not None:
        release = _launch.release_of(arguments.megatron_release)
        _script.write_script(tuned.plans[0], arguments.script, part(tuned.requests[0], "model"), release)
    if arguments.page is not None:
        _launch.write_page(tuned.plans[0], arguments.page, _script.mtp_layers(part(tuned.requests[0], "model")))
    result = _document(tuned)
    if arguments.what_to_measure and code == 0:
        result["decision"] = _decision(tuned.requests, result["top"], devices)
    else:
        result["top"] = result["top"][:3]
    if arguments.json:
        print(json.dumps(result))
    else:
        print("\n".join(answer_lines(tuned.plans[0], tokens)))
        _print(result)
    return code


def _document(tuned: Tuned) -> Tuning:
    first = tuned.plans[0].search
    return {
        "schema_version": 2,
        "profile_source": "analytic",
        "num_candidates": first.num_configurations,
        "num_solved": first.num_solved,
        "status": first.status,
        "gap_fraction": first.gap_fraction,
        "lower_bound_ms": first.lower_bound_us / 1e3,
        "seconds": first.seconds,
        "left_out": dict(tuned.left_out),
        "top": [
            _choice(plan, request, answer)
            for plan, request, answer in zip(tuned.plans, tuned.requests, tuned.answers, strict=True)
        ],
    }


def _choice(plan: Plan, request: Mapping[str, object], answer: Answer) -> Choice:
    """Return a plan with the answer of ``predict`` to its request; step and memory are the plan's."""
    from mindspeed_autoparallel.report.answer import answer_of

    notes = list(answer.get("notes", []))
    notes += [f"{key}: no flag of the host is known here" for key in _launch.without_flags(plan, _launch.host_of(plan))]
    try:
        argv = _launch.launch_flags(plan, _launch.host_of(plan), _script.mtp_layers(part(request, "model")))
    except PlanError as error:
        argv = []
        notes.append(f"{error} No flags are printed.")
    step_ms, peak_gib = plan.step.total_us / 1e3, max(rank.peak_bytes for rank in plan.memory) / 2**30
    scale = step_ms / answer.get("step_time_ms", step_ms)
    interval = [scale * end for end in answer.get("step_time_interval_ms", [step_ms, step_ms])]
    name, figures = plan.model.modules[-1].name, answer_of(plan)
    return {
        **answer,
        "status": "ok",
        "parallel": dict(part(request, "parallel")),
        "train": dict(part(request, "train")),
        "argv": argv,
        "host": _launch.host_of(plan),
        "step_time_ms": step_ms,
        "step_time_interval_ms": interval,
        "peak_memory_gib": peak_gib,
        "tokens_per_s_per_device": figures.tokens_per_s_per_device,
        "tokens_per_s": figures.tokens_per_s,
        "mfu": figures.mfu,
        "free_memory_gib": (figures.limit_bytes - figures.peak_bytes) / 2**30,
        "layers": list(plan.layers_of(name)),
        "recomputed": {kind: list(plan.recomputed_of(name, kind)) for kind in ("selective", "full")},
        "notes": notes,
    }


def _print(result: Tuning) -> None:
    proved = f"gap {result['gap_fraction']:.1%}" if result["status"] != "optimal" else "proved optimal"
    print(f"{result['num_candidates']} layouts, {proved} under the cost model, {result['seconds']:.1f} s")
    for place, plan in enumerate(result["top"][:3], start=1):
        print(f"{place}. {plan['step_time_ms']:.1f} ms, {plan['peak_memory_gib']:.1f} GiB: {shlex.join(plan['argv'])}")
    for note in result["top"][0]["notes"]:
        print(f"note: {note}")
    print(f"analytic: nothing was measured; device figures: {result['top'][0]['provenance']}")
    for reason, number in result["left_out"].items():
        print(f"  left out {number:6d}: {reason}")
    if "decision" in result:
        print("\n".join(_decision_lines(result["decision"])))


def _decision(
    requests: Sequence[Mapping[str, object]], top: Sequence[Choice], extra: tuple[Device, ...]
) -> DecisionAnswer:
    """Return the certainty of the choice as JSON; plans are given by rank."""
    from mindspeed_autoparallel.cost.analytic.reading import read_workload
    from mindspeed_autoparallel.cost.catalogue import find_device
    from mindspeed_autoparallel.predict.experiments import decide

    works = [read_workload(request) for request in requests]
    found = decide(works, find_device(works[0].gpu, extra))
    experiments: list[ExperimentAnswer] = []
    for item in found.experiments:
        plan = top[item.candidate]
        experiments.append(
            {
                "parallel": {**plan["parallel"], "dp": item.work.data_size},
                "train": {**plan["train"], "gbs": item.work.global_batch},
                "num_devices": item.work.num_devices,
                "device_seconds": item.device_seconds,
                "narrows": list(item.narrows),
                "worst_regret_after": item.worst_regret_after,
            }
        )
    return {
        "fastest": found.fastest + 1,
        "safest": found.safest + 1,
        "worst_regret": dict(found.worst_regret),
        "undecided": [plan + 1 for plan in found.undecided],
        "settling": None if found.settling is None else found.settling + 1,
        "settling_parallel": None if found.settling is None else top[found.settling]["parallel"],
        "hangs_on": dict(found.hangs_on),
        "experiments": experiments,
    }


def _undecided_lines(decision: DecisionAnswer) -> list[str]:
    """Return which plans may be faster than the first, and the run that gains most."""
    settling = decision["settling_parallel"]
    if not decision["undecided"] or settling is None:
        return [f"the choice is settled: none of {_COMPARED} plans compared may be 0.5 % faster than plan 1"]
    named = ", ".join(map(str, decision["undecided"][:8])) + (" ..." if len(decision["undecided"]) > 8 else "")
    layout = " ".join(f"{key} {value}" for key, value in settling.items() if value != 1)
    return [
        f"undecided: plan{'s' * (len(decision['undecided']) > 1)} {named} may be faster than plan 1, by up to "
        f"{decision['worst_regret']['fastest']:.1%}; run ten steps of plan {decision['settling']} ({layout}) beside "
        "plan 1"
    ]


def _decision_lines(decision: DecisionAnswer) -> list[str]:
    worst = decision["worst_regret"]
    lines = _undecided_lines(decision)
    lines.append(
        f"least worst regret: plan {decision['safest']} of {_COMPARED} compared, {worst['safest']:.1%} "
        f"(plan 1: {worst['fastest']:.1%})"
    )
    if not decision["hangs_on"]:
        return [*lines, "no figure within nine tenths of its range makes another plan 0.5 % faster"]
    named = ", ".join(f"{name} ({regret:.1%})" for name, regret in list(decision["hangs_on"].items())[:4])
    lines.append(f"the choice depends on {named}: the loss of plan 1 to another plan within their ranges")
    for number, item in enumerate(decision["experiments"], start=1):
        layout = " ".join(f"{key} {value}" for key, value in item["parallel"].items() if key != "dp" and value != 1)
        narrowed = f", narrows {', '.join(item['narrows'])}" if item["narrows"] else ""
        lines.append(
            f"measure {number}: {layout or 'one device'}, mbs {item['train']['mbs']}, gbs {item['train']['gbs']} on "
            f"{item['num_devices']} devices, about {item['device_seconds']:.0f} device seconds for 10 steps{narrowed}; "
            f"worst regret then {item['worst_regret_after']:.1%}"
        )
    return lines
