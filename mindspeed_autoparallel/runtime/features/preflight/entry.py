"""``--auto-parallel-preflight`` from the host's parsed arguments to the report; then the process ends."""

from __future__ import annotations

import argparse
import sys

from mindspeed_autoparallel.interrupts import leaving_kept
from mindspeed_autoparallel.progress import show_progress
from mindspeed_autoparallel.report.preflight_verdict import EXIT_CODES
from mindspeed_autoparallel.runtime.features.preflight.conclude import conclude
from mindspeed_autoparallel.runtime.features.preflight.request import read_request
from mindspeed_autoparallel.runtime.features.preflight.source import run_source
from mindspeed_autoparallel.runtime.features.preflight.write import write
from mindspeed_autoparallel.runtime.launch.work_dir_lock import only_one


def run_and_exit(arguments: argparse.Namespace) -> None:
    """Run the ranks, report, and end the process: training does not start."""
    show_progress("pre-flight")
    request = read_request(arguments)
    with leaving_kept(f"results of finished ranks are in {request.work_dir}"):
        with only_one(request.work_dir, "--auto-parallel-work-dir"):
            result = conclude(request, run_source(request))
        write(request.output_dir, result)
    sys.exit(EXIT_CODES[result.verdict])
