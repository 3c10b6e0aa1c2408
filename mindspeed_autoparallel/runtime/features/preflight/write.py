"""The result of a pre-flight as a file, and for people."""

from __future__ import annotations

from pathlib import Path

from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.profiles.records import json_of
from mindspeed_autoparallel.report.preflight import render
from mindspeed_autoparallel.report.preflight_result import PreflightResult

RESULT_FILE = "preflight_result.json"


def write(output_dir: Path, result: PreflightResult) -> None:
    """Write ``preflight_result.json`` and print the report."""
    output_dir.mkdir(parents=True, exist_ok=True)
    target = output_dir / RESULT_FILE
    write_json_atomic(target, json_of(result))
    print(render(result), flush=True)
    print(f"written: {target}", flush=True)
