"""Find the three fastest layouts that fit, by prediction alone, with the flags to paste.

FILE holds one request as for predict, with an empty or partial "parallel"; what it names is held.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_autoparallel.cost.device import Device
    from mindspeed_autoparallel.predict.answers import Choices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--request", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--device-file", type=Path, action="append", default=[], help="a device of your own (repeatable)"
    )
    parser.add_argument(
        "--profile-source",
        choices=("analytic",),
        default="analytic",
        help="nothing is measured by this command; a script with --auto-tuning measures",
    )
    parser.add_argument(
        "--what-to-measure",
        action="store_true",
        help="say on which figures the choice hangs, which runs would settle it, and the plan that regrets least",
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")


_COMPARED = 20
"""Fastest plans among which --what-to-measure looks."""


def run(arguments: argparse.Namespace) -> int:
    """Search and print; exit code 3 when nothing fits."""
    from mindspeed_autoparallel.cost.catalogue import read_device
    from mindspeed_autoparallel.errors import ConfigError
    from mindspeed_autoparallel.files import read_json
    from mindspeed_autoparallel.predict.search import search

    request = read_json(arguments.request, "request file")
    if not isinstance(request, dict) or not all(
        isinstance(request.get(name), dict) for name in ("model", "hw", "train")
    ):
        raise ConfigError(f"{arguments.request} must be one request: an object with model, hw and train, not a list.")
    devices = tuple(read_device(path) for path in arguments.device_file)
    result = search(request, devices, _COMPARED if arguments.what_to_measure else 3)
    decision = _decision(request, result, devices) if arguments.what_to_measure else None
    result["top"] = result["top"][:3] if decision is None else result["top"]
    if decision is not None:
        result["decision"] = decision
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"{result['num_candidates']} layouts, {result['num_fitting']} fit")
    for place, plan in enumerate(result["top"][:3], start=1):
        print(f"{place}. {plan['step_time_ms']:.1f} ms, {plan['peak_memory_gib']:.1f} GiB: {shlex.join(plan['argv'])}")
    for note in result["top"][0]["notes"]:
        print(f"note: {note}")
    print(f"analytic: nothing was measured; device figures: {result['top'][0]['provenance']}")
    for reason, number in result["left_out"].items():
        print(f"  left out {number:6d}: {reason}")
    if decision is not None:
        print("\n".join(_decision_lines(decision)))
    return 0


def _decision(request: dict[str, Any], result: Choices, extra: tuple[Device, ...]) -> dict[str, Any]:
    """Return how sure the choice is, as JSON holds it; plans by their place."""
    import dataclasses

    from mindspeed_autoparallel.cost.analytic.reading import read_workload
    from mindspeed_autoparallel.cost.catalogue import find_device
    from mindspeed_autoparallel.predict.experiments import decide

    works = [read_workload({**request, "parallel": plan["parallel"], "train": plan["train"]}) for plan in result["top"]]
    found = decide(works, find_device(works[0].gpu, extra))
    experiments = []
    for item in found.experiments:
        plan = result["top"][item.candidate]
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
    document = dataclasses.asdict(found)
    return {**document, "fastest": found.fastest + 1, "safest": found.safest + 1, "experiments": experiments}


def _decision_lines(decision: dict[str, Any]) -> list[str]:
    """Return what was decided, as text."""
    worst = decision["worst_regret"]
    if not decision["hangs_on"]:
        return ["the choice is settled: no figure within nine tenths of its range makes another plan 0.5 % faster"]
    named = ", ".join(f"{name} ({regret:.1%})" for name, regret in list(decision["hangs_on"].items())[:4])
    lines = [
        f"the choice hangs on {named}: what plan 1 may lose to another within their range",
        f"least worst regret: plan {decision['safest']} of {_COMPARED} compared, {worst['safest']:.1%} "
        f"(plan 1: {worst['fastest']:.1%})",
    ]
    for number, item in enumerate(decision["experiments"], start=1):
        layout = " ".join(f"{key} {value}" for key, value in item["parallel"].items() if key != "dp" and value != 1)
        narrowed = f", narrows {', '.join(item['narrows'])}" if item["narrows"] else ""
        lines.append(
            f"measure {number}: {layout or 'one device'}, mbs {item['train']['mbs']}, gbs {item['train']['gbs']} on "
            f"{item['num_devices']} devices, about {item['device_seconds']:.0f} device seconds for 10 steps{narrowed}; "
            f"worst regret then {item['worst_regret_after']:.1%}"
        )
    return lines
