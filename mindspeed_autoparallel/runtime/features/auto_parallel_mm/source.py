"""The profile for a search: read from a file, computed for a device of the catalogue, or measured."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace

from mindspeed_autoparallel.errors import LaunchError, ProfileError
from mindspeed_autoparallel.planner.tuner.links import tiers_of
from mindspeed_autoparallel.profiles import LinkTier, Profile, read_profile
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.measurements import Measurements
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest
from mindspeed_autoparallel.runtime.features.measuring import coordinator
from mindspeed_autoparallel.runtime.launch.orders import own_command
from mindspeed_autoparallel.runtime.launch.outcome import LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.profiling.calibrate.results import LINKS_FILE, read_links
from mindspeed_autoparallel.runtime.profiling.sources.analytic import computed_profile
from mindspeed_autoparallel.runtime.profiling.sources.building import build_profile, provenance_of
from mindspeed_autoparallel.runtime.profiling.sources.device_cost import device_cost, links_of

_LOGGER = logging.getLogger(__name__)


def profile_source(request: SearchRequest, arguments: argparse.Namespace) -> Profile:
    """Return the profile of the model in ``arguments``, and keep it in the work dir unless it was read from a file."""
    if request.profile_file is not None:
        _LOGGER.info(f"planning from {request.profile_file}; nothing is measured")
        profile = read_profile(request.profile_file)
        _check_model(profile, request)
        return profile
    if request.target_device is not None:
        profile = computed_profile(
            arguments, request.description, request.target_device, request.cluster_devices_per_node
        )
        profile.write(request.work_dir / "profile.json")
        return profile
    from mindspeed_autoparallel.runtime.devices.selection import current_device

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


def _check_model(profile: Profile, request: SearchRequest) -> None:
    """Raise ``ProfileError`` if the profile of a file is that of another model: no training would take its plan."""
    origin, description = profile.provenance, request.description
    planned = [(module.name, module.num_layers) for module in profile.model.modules]
    given = [(module.name, module.num_layers) for module in description.modules]
    same_layers = [count for _, count in planned] == [count for _, count in given]
    if same_layers and origin.model_hash in ("", description.model_hash):
        return
    hashes = f" (hash {origin.model_hash[:12]}, this one is {description.model_hash[:12]})" if origin.model_hash else ""
    raise ProfileError(
        f"{request.profile_file} is the profile of another model{hashes}: "
        f"{', '.join(f'{name} {count} layers' for name, count in planned)} there, "
        f"{', '.join(f'{name} {count} layers' for name, count in given)} here. Give this model's profile, or leave "
        "--auto-parallel-profile-file out to measure."
    )


def measured_between_nodes(request: SearchRequest, device_fingerprint: Mapping[str, str]) -> LinkTier:
    """Return the links between the nodes, sampled with one rank of each unless an earlier run has saved them.

    The other nodes are free afterwards. ``LaunchError`` if a node is missing or the launch fails.
    """
    key = [request.num_nodes, request.master_addr, dict(device_fingerprint)]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = request.work_dir / "links" / digest
    with coordinator(request) as launcher:
        if read_links(folder).rows:
            _LOGGER.info(f"the links between nodes are those of {folder / LINKS_FILE}; remove it to measure again")
        else:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            spec = LaunchSpec(
                launch_id=f"links-{os.getpid()}-{int(time.time())}",
                argv=own_command(),
                task={"kind": "links", "folder": str(folder)},
                timeout_s=request.launch_timeout_s,
            )
            outcome = launcher.launch(spec)
            if outcome.status is not LaunchStatus.OK:
                raise LaunchError(f"the links between nodes could not be measured: {outcome.describe()}")
            _LOGGER.info(f"measured the links between {request.num_nodes} nodes in {outcome.seconds:.0f} s")
    return tiers_of(read_links(folder).rows)["inter"]
