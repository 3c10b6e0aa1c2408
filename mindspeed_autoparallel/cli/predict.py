"""Predict step time and peak memory of training runs from their shapes, without an accelerator.

FILE holds {"requests": [{"id", "model", "hw", "parallel", "train"}]}; see docs/predict.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.cli import _launch, _script
from mindspeed_autoparallel.cost.analytic.fields import part
from mindspeed_autoparallel.files import printable

if TYPE_CHECKING:
    from mindspeed_autoparallel.cost.device import Device
    from mindspeed_autoparallel.predict.answers import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--request", type=Path, required=True, metavar="FILE", help="JSON file with the requests")
    add("--device-file", type=Path, action="append", default=[], help="file that describes a device (repeatable)")
    add(
        "--page",
        type=Path,
        metavar="FILE",
        help="write the answer's page to this file; several requests get one numbered page each",
    )
    add("--json", action="store_true", help="print JSON only")


def _line(answer: Answer) -> str:
    name = printable(str(answer["id"] if answer["id"] is not None else "-"))
    if answer["status"] == "error":
        return f"{name:24s} {'error':14s} {answer['reason']}"
    low, high = answer["step_time_interval_ms"]
    text = f"{name:24s} {answer['status']:14s} {answer['step_time_ms']:12.1f} [{low:.0f}, {high:.0f}]"
    return f"{text} {answer['peak_memory_gib']:10.1f} {answer['tokens_per_s_per_device']:12.0f}"


def run(arguments: argparse.Namespace) -> int:
    """Print the answers, refused ones with their reasons; exit code 2 if all are refused."""
    from mindspeed_autoparallel.cost.catalogue import read_device
    from mindspeed_autoparallel.files import read_json
    from mindspeed_autoparallel.predict.predict import predict

    devices = tuple(read_device(path) for path in arguments.device_file)
    document = read_json(arguments.request, "request file")
    result = predict(document, devices, str(arguments.request))
    answers = result["predictions"]
    if arguments.page is not None:
        _write_pages(document["requests"] if isinstance(document, dict) else document, answers, devices, arguments.page)
    if arguments.json:
        print(json.dumps(result))
    else:
        _print_table(answers)
    again = [name for name, number in Counter(json.dumps(answer["id"]) for answer in answers).items() if number > 1]
    if again := [name for name in again if name != "null"]:
        said = f"ids shared by several requests, answered in the order of the requests: {', '.join(again[:5])}"
        print(said + (f" and {len(again) - 5} more" if len(again) > 5 else ""), file=sys.stderr)
    if not answers:
        print("the request file holds no request: its list is empty", file=sys.stderr)
    elif all(answer["status"] == "error" for answer in answers):
        print(f"none of {len(answers)} requests could be answered; the first: {answers[0]['reason']}", file=sys.stderr)
        return 2
    return 0


def _write_pages(
    requests: Sequence[Mapping[str, object]], answers: Sequence[Answer], devices: tuple[Device, ...], page: Path
) -> None:
    """Write a page for every request that was answered."""
    from mindspeed_autoparallel.predict.price import priced_plan

    for number, (request, answer) in enumerate(zip(requests, answers, strict=True), start=1):
        if answer["status"] == "error":
            continue
        path = page if len(requests) == 1 else page.with_stem(f"{page.stem}-{number}")
        _launch.write_page(priced_plan(request, devices), path, _script.mtp_layers(part(request, "model")))


def _print_table(answers: list[Answer]) -> None:
    print(f"{'id':24s} {'status':14s} {'step_ms':>12s} [interval] {'peak_GiB':>10s} {'tokens/s/dev':>12s}")
    for answer in answers:
        print(_line(answer))
        for note in answer["notes"]:
            print(f"{'':24s} note: {note}")
