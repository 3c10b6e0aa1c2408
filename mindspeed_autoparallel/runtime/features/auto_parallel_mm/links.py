"""Links between the nodes of a search whose first device plays every rank, by a launch of their own on all nodes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping

from mindspeed_autoparallel.errors import LaunchError
from mindspeed_autoparallel.planner.tuner.links import tiers_of
from mindspeed_autoparallel.profiles import LinkTier
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest
from mindspeed_autoparallel.runtime.features.measuring import coordinator
from mindspeed_autoparallel.runtime.launch import LaunchSpec, LaunchStatus
from mindspeed_autoparallel.runtime.launch.orders import own_command
from mindspeed_autoparallel.runtime.profiling.calibrate.worker import LINKS_FILE, read_links

_LOGGER = logging.getLogger(__name__)


def measured_between_nodes(request: SearchRequest, device_fingerprint: Mapping[str, str]) -> LinkTier:
    """Return the links between the nodes, sampled among one rank of each unless an earlier run has kept them.

    The other nodes are free afterwards. ``LaunchError`` where a node is missing or the launch fails.
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
