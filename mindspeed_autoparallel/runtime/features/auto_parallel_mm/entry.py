"""``--auto-parallel-mm`` from the host's parsed arguments to the files in the run directory; then the process ends."""

from __future__ import annotations

import argparse
import sys

from mindspeed_autoparallel.interrupts import leaving_kept
from mindspeed_autoparallel.progress import show_progress
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import read_request
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.source import profile_source
from mindspeed_autoparallel.runtime.features.measuring import serve_main_node
from mindspeed_autoparallel.runtime.launch.work_dir import only_one


def search_and_exit(arguments: argparse.Namespace) -> None:
    """Measure, plan, write, and end the process: training does not start."""
    show_progress("auto-parallel")
    request = read_request(arguments)
    serve_main_node(request, "")
    what_stays = f"finished measurements are kept in {request.work_dir} and will be reused"
    with leaving_kept(what_stays), only_one(request.work_dir, "--auto-parallel-work-dir"):
        profile = profile_source(request, arguments)
        # Imported late: OR-Tools takes most of a second to load.
        from mindspeed_autoparallel.runtime.features.auto_parallel_mm.search import search
        from mindspeed_autoparallel.runtime.features.auto_parallel_mm.write import write

        write(request, search(request, profile, arguments), profile)
    sys.exit(0)
