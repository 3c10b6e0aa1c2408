"""``--auto-parallel-mm`` from the host's parsed arguments to the files in the run directory; then the process ends."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.interrupts import leaving_kept
from mindspeed_autoparallel.profiles import Profile, read_profile
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.analytic import computed_profile
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.device_cost import device_cost
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.measurements import Measurements
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.profile_building import build_profile
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest, read_request
from mindspeed_autoparallel.runtime.launch import Coordinator, run_agent
from mindspeed_autoparallel.runtime.launch.ports import check_port_is_free
from mindspeed_autoparallel.runtime.megatron.sends import interleaved_sends

_started = time.monotonic()


def say(text: str) -> None:
    """One line of progress, with the time since the start."""
    print(f"[auto-parallel {time.monotonic() - _started:6.1f} s] {text}", flush=True)


def search_and_exit(arguments: argparse.Namespace) -> None:
    """Measure, plan, write, and end the process: training does not start."""
    request = read_request(arguments)
    if request.node_rank > 0 and request.analytic_device is not None:
        say(f"node {request.node_rank}: nothing is measured with --profile-source analytic; node 0 plans alone")
        sys.exit(0)
    if request.node_rank > 0:
        with leaving_kept(say, f"node {request.node_rank} has left"):
            num_launches = run_agent(
                node_rank=request.node_rank,
                num_nodes=request.num_nodes,
                num_processes_per_node=request.num_processes_per_node,
                master_addr=request.master_addr,
                master_port=request.master_port,
                log_dir=request.work_dir / "logs",
            )
        say(f"node {request.node_rank}: done after {num_launches} launches; the results are on node 0")
        sys.exit(0)
    with leaving_kept(say, f"finished measurements are kept in {request.work_dir} and will be reused"):
        profile = _profile(request, arguments)
        from mindspeed_autoparallel.runtime.features.auto_parallel_mm.planning import plan_and_write

        plan_and_write(request, profile, Path(arguments.auto_parallel_output_dir).resolve(), say)
    sys.exit(0)


def _profile(request: SearchRequest, arguments: Any) -> Profile:
    if request.profile_file is not None:
        say(f"planning from {request.profile_file}; nothing is measured")
        return read_profile(request.profile_file)
    if request.analytic_device is not None:
        profile = computed_profile(
            arguments, request.description, request.analytic_device, request.cluster_devices_per_node, say
        )
        profile.write(request.work_dir / "profile.json")
        return profile
    from mindspeed_autoparallel.runtime.devices import current_device

    device = current_device()
    fingerprint = device.fingerprint()
    measurements = Measurements(request, fingerprint)
    say(
        f"{len(request.points())} points to measure on {request.num_nodes} x {request.num_processes_per_node} "
        f"{fingerprint['device']}; work dir {request.work_dir}"
    )
    if request.num_nodes > 1:
        check_port_is_free(request.master_port)
        say(f"waiting for {request.num_nodes - 1} other nodes at {request.master_addr}:{request.master_port}")
    with Coordinator(
        num_nodes=request.num_nodes,
        num_processes_per_node=request.num_processes_per_node,
        master_addr=request.master_addr,
        master_port=request.master_port,
        log_dir=request.work_dir / "logs",
    ) as coordinator:
        results = measurements.take(coordinator, say)
    cost, notes = device_cost(results)
    for note in notes:
        say(note)
    profile = build_profile(
        request.description,
        results,
        cost,
        sequence_length=int(arguments.seq_length),
        vocab_size=int(getattr(arguments, "padded_vocab_size", None) or arguments.vocab_size or 0),
        device_name=fingerprint["device"],
        software={name: value for name, value in fingerprint.items() if name != "device"},
        interleaved_sends=interleaved_sends(arguments),
    )
    profile.write(request.work_dir / "profile.json")
    say(f"profile written to {request.work_dir / 'profile.json'}")
    return profile
