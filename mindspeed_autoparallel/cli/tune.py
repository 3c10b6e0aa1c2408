"""Find the three fastest layouts that fit, by prediction alone, with the flags to paste.

FILE holds one request as for predict, with an empty or partial "parallel"; what it names is held.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path


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
    parser.add_argument("--json", action="store_true", help="print JSON only")


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
    result = search(request, tuple(read_device(path) for path in arguments.device_file))
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"{result['num_candidates']} layouts, {result['num_fitting']} fit")
    for place, plan in enumerate(result["top"], start=1):
        print(f"{place}. {plan['step_time_ms']:.1f} ms, {plan['peak_memory_gib']:.1f} GiB: {shlex.join(plan['argv'])}")
    for note in result["top"][0]["notes"]:
        print(f"note: {note}")
    print(f"analytic: nothing was measured; device figures: {result['top'][0]['provenance']}")
    for reason, number in result["left_out"].items():
        print(f"  left out {number:6d}: {reason}")
    return 0
