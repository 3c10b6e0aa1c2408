"""``--auto-parallel-mm`` from the host's parsed arguments to the files in the run directory; then the process ends."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from mindspeed_autoparallel.interrupts import leaving_kept
from mindspeed_autoparallel.profiles import Profile, read_profile
from mindspeed_autoparallel.progress import show_progress
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.measurements import Measurements
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest, read_request
from mindspeed_autoparallel.runtime.features.measuring import coordinator, serve_main_node
from mindspeed_autoparallel.runtime.launch.work_dir_lock import only_one
from mindspeed_autoparallel.runtime.profiling.sources.analytic import computed_profile
from mindspeed_autoparallel.runtime.profiling.sources.building import build_profile, provenance_of
from mindspeed_autoparallel.runtime.profiling.sources.device_cost import device_cost

_LOGGER = logging.getLogger(__name__)


def search_and_exit(arguments: argparse.Namespace) -> None:
    """Measure, plan, write, and end the process: training does not start."""
    show_progress("auto-parallel")
    request = read_request(arguments)
    serve_main_node(request, "")
    what_stays = f"finished measurements are kept in {request.work_dir} and will be reused"
    with leaving_kept(what_stays), only_one(request.work_dir, "--auto-parallel-work-dir"):
        profile = _profile(request, arguments)
        from mindspeed_autoparallel.runtime.features.auto_parallel_mm.planning import plan_and_write

        plan_and_write(request, profile)
    sys.exit(0)


def _profile(request: SearchRequest, arguments: Any) -> Profile:
    if request.profile_file is not None:
        _LOGGER.info(f"planning from {request.profile_file}; nothing is measured")
        return read_profile(request.profile_file)
    if request.target_device is not None:
        profile = computed_profile(
            arguments, request.description, request.target_device, request.cluster_devices_per_node
        )
        profile.write(request.work_dir / "profile.json")
        return profile
    from mindspeed_autoparallel.runtime.devices import current_device

    device = current_device()
    fingerprint = device.fingerprint()
    measurements = Measurements(request, fingerprint)
    _LOGGER.info(
        f"{len(request.points())} points to measure on {request.num_nodes} x {request.num_processes_per_node} "
        f"{fingerprint['device']}; work dir {request.work_dir}"
    )
    with coordinator(request) as launcher:
        results = measurements.take(launcher)
    cost, notes = device_cost(results)
    for note in notes:
        _LOGGER.info(note)
    software = {name: value for name, value in fingerprint.items() if name != "device"}
    provenance = provenance_of(request.description, "measured", fingerprint["device"], software)
    profile = build_profile(request.description, results, cost, arguments, provenance)
    profile.write(request.work_dir / "profile.json")
    _LOGGER.info(f"profile written to {request.work_dir / 'profile.json'}")
    return profile
