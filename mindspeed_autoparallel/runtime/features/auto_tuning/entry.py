"""``--auto-tuning`` from the host's parsed arguments to the files in the work dir; then the process ends."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.interrupts import leaving_kept
from mindspeed_autoparallel.progress import show_progress
from mindspeed_autoparallel.runtime.features.auto_tuning.argv import SETTABLE_FLAGS
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest, read_request
from mindspeed_autoparallel.runtime.features.measuring import coordinator, serve_main_node
from mindspeed_autoparallel.runtime.launch.work_dir import only_one

_LOGGER = logging.getLogger(__name__)


def search_and_exit(arguments: argparse.Namespace) -> None:
    """Trace, measure, search, write the results, and end the process: training does not start."""
    if not Path(sys.argv[0]).is_file():
        raise ConfigError(
            f"--auto-tuning starts the script again to trace it, but {sys.argv[0]!r} is not a file that can be read. "
            "Start it as python SCRIPT.py."
        )
    request = read_request(arguments)
    show_progress("auto-tuning", request.log_level)
    serve_main_node(request, "; node 0 continues with its own measurements", SETTABLE_FLAGS)
    what_stays = f"finished traces and measurements are kept in {request.work_dir}"
    with leaving_kept(what_stays), only_one(request.work_dir, "--auto-tuning-work-dir"):
        _tune(request, arguments)
    sys.exit(0)


def _tune(request: TuningRequest, arguments: argparse.Namespace) -> None:
    # Imported after the request is checked: these modules load sqlite, the planner and torch.
    from mindspeed_autoparallel.report.tuning import render_table
    from mindspeed_autoparallel.runtime.features.auto_tuning.launches import Launches
    from mindspeed_autoparallel.runtime.features.auto_tuning.search import search
    from mindspeed_autoparallel.runtime.features.auto_tuning.source import profile_source, what_to_search
    from mindspeed_autoparallel.runtime.features.auto_tuning.verify import verify
    from mindspeed_autoparallel.runtime.features.auto_tuning.write import PAGE_FILE, RESULT_FILE, write

    plan = what_to_search(request, arguments)
    with coordinator(request) as launcher:
        launches = Launches(request, launcher)
        profiles = profile_source(request, plan, arguments, launches)
        _LOGGER.info("stage 3 of 3: search")
        recommended = search(request, profiles, arguments)
        result = write(request, profiles, recommended, launches)
        if request.verify and request.target_device is not None:
            _LOGGER.warning("--auto-tuning-verify needs devices and is left out with --profile-source analytic")
        elif request.verify:
            verify(request, recommended.picks, launches, result)
    print(render_table(result), end="", flush=True)
    _LOGGER.info(f"result: {request.work_dir / RESULT_FILE}; page: {request.work_dir / PAGE_FILE}")
