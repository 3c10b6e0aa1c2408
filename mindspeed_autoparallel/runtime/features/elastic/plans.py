"""The plan for the current processes: the user's own, an earlier one, or a new one that rank 0 makes for all."""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

from mindspeed_autoparallel.errors import AutoParallelError, ConfigError, LaunchError
from mindspeed_autoparallel.files import read_text, write_text_atomic
from mindspeed_autoparallel.runtime.features.apply_plan.applicable import check_applies, gives_recompute
from mindspeed_autoparallel.runtime.features.elastic.request import ElasticRequest
from mindspeed_autoparallel.runtime.megatron.fixed_sizes import fixed_sizes
from mindspeed_autoparallel.spec import Plan

_POLL_S = 0.1
_GRACE_S = 60.0
"""Seconds added to the search's time limit, for file systems, imports, and the layouts that it compares first."""


def plan_for_world(request: ElasticRequest, arguments: argparse.Namespace) -> tuple[Path, Plan]:
    """Return the plan for all processes of ``request`` or fewer, and its file, which all nodes can read.

    ``arguments``: the host's parsed arguments.

    Raises ``InfeasiblePlan`` if the model fits no number of these devices, and ``LaunchError`` if rank 0 does not write
    a plan in time.
    """
    world, plan = request.world, request.plan
    if world.size == plan.layout.num_devices and world.per_node == plan.cluster.devices_per_node:
        return request.plan_file, plan
    path = _file_of(request)
    if world.rank == 0 and not path.exists():
        _failure(path).unlink(missing_ok=True)
        _write_plan(request, path, arguments)
    _wait_for(path, _failure(path), request)
    return path, Plan.read(path)


def _file_of(request: ElasticRequest) -> Path:
    """Return the plan's file name, with a hash of its inputs: an edited plan gets its own derived plans."""
    digest = hashlib.sha256(request.plan.text().encode()).hexdigest()[:8]
    world = request.world
    return request.folder / f"plan-{digest}-{world.num_nodes}x{world.per_node}.json"


def _failure(path: Path) -> Path:
    return path.with_suffix(f".{os.environ.get('MASTER_PORT', '0')}.failed")


def _write_plan(request: ElasticRequest, path: Path, arguments: argparse.Namespace) -> None:
    """Write the plan to ``path``, or the reason for a failure to a file next to it, for the ranks that wait."""
    from mindspeed_autoparallel.planner.replan.best import best_plan
    from mindspeed_autoparallel.planner.replan.sources import cluster_of_nodes, costs_of

    world = request.world
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        profile, note = costs_of(request.plan, request.plan_file)
        if note:
            print(f"elastic: {note}", flush=True)
        began = time.monotonic()
        sizes = fixed_sizes(arguments, request.description.content if request.plan.hetero is None else {})
        kept = tuple(one for one in profile.measurements if sizes.runs(one.at))
        plan = best_plan(
            request.plan,
            replace(profile, measurements=kept or profile.measurements),
            cluster_of_nodes(request.plan, world.num_nodes, world.per_node),
            time_limit_s=request.time_limit_s,
            splits=request.splits,
            host=request.host,
            runs=lambda plan: gives_recompute(plan, request.description, arguments),
        )
        check_applies(plan, request.description, arguments, path)
        print(f"elastic: planned for {world.size} processes in {time.monotonic() - began:.1f} s", flush=True)
    except AutoParallelError as error:
        write_text_atomic(_failure(path), str(error))
        raise
    write_text_atomic(path, plan.text())


def _wait_for(path: Path, failure: Path, request: ElasticRequest) -> None:
    limit_s = request.time_limit_s * request.world.num_nodes + _GRACE_S
    until = time.monotonic() + limit_s
    while not path.exists():
        if failure.exists():
            raise ConfigError(read_text(failure, "failure of rank 0"))
        if time.monotonic() > until:
            raise LaunchError(
                f"rank 0 has not written {path} within {limit_s:.0f} s: look at its output, and keep --save on storage "
                "that all nodes share."
            )
        time.sleep(_POLL_S)
