"""The profile that a search plans by: a file's, computed for a device of the catalogue, or measured."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace

from mindspeed_autoparallel.profiles import Profile, read_profile
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.links import measured_between_nodes
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.measurements import Measurements
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest
from mindspeed_autoparallel.runtime.features.measuring import coordinator
from mindspeed_autoparallel.runtime.profiling.sources.analytic import computed_profile
from mindspeed_autoparallel.runtime.profiling.sources.building import build_profile, provenance_of
from mindspeed_autoparallel.runtime.profiling.sources.device_cost import device_cost, links_of

_LOGGER = logging.getLogger(__name__)


def profile_source(request: SearchRequest, arguments: argparse.Namespace) -> Profile:
    """Return the profile of the model in ``arguments``, which is kept in the work dir unless it was read."""
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
    between_nodes = None
    if request.num_played and request.num_nodes > 1:
        between_nodes = measured_between_nodes(request, fingerprint)
        request = replace(request, num_nodes=1)
    measurements = Measurements(request, fingerprint, between_nodes)
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
    provenance = replace(
        provenance_of(request.description, "measured", fingerprint["device"], software),
        links=links_of(results) or "; ".join(notes) or f"measured among {request.num_measuring} ranks",
    )
    profile = build_profile(request.description, results, cost, arguments, provenance, request.layer_choices)
    profile.write(request.work_dir / "profile.json")
    _LOGGER.info(f"profile written to {request.work_dir / 'profile.json'}")
    return profile
