"""Search for a plan from a measured profile, and write it and the user's YAML with its decisions."""

from __future__ import annotations

from mindspeed_autoparallel.files import made_folder, write_text_atomic
from mindspeed_autoparallel.hosts.mindspeed_mm_decisions import decided_values, read_decisions, sharding_host
from mindspeed_autoparallel.profiles.sharded import ShardedProfile
from mindspeed_autoparallel.runtime.devices import current_device
from mindspeed_autoparallel.runtime.fsdp2.flags import NativeRequest
from mindspeed_autoparallel.runtime.fsdp2.trainer import NativeTrainer, say
from mindspeed_autoparallel.spec.cluster import Cluster
from mindspeed_autoparallel.units import MIB


def plan_and_write(native: NativeTrainer, request: NativeRequest, profile: ShardedProfile) -> None:
    """Search for the cluster of ``request``, and write profile, plan, page and YAML."""
    # Importing OR-Tools takes most of a second.
    from mindspeed_autoparallel.planner.sharded.search import ShardedOptions, search_sharded
    from mindspeed_autoparallel.report.sharded import render_sharded_page

    work = made_folder(request.work_dir, "--auto-parallel-work-dir")
    output = made_folder(request.output_dir, "--auto-parallel-output-dir")
    profile.write(work / "sharded_profile.json")
    limit = request.memory_limit_mib
    cluster = Cluster(
        num_nodes=request.num_nodes,
        devices_per_node=request.devices_per_node,
        memory_limit_bytes=limit * MIB if limit else None,
    )
    npu = current_device().name == "npu"
    num_devices = request.num_nodes * request.devices_per_node
    shipped = read_decisions(native.config, profile.modules, num_devices, npu)
    options = ShardedOptions(time_limit_s=float(request.time_limit_s))
    plan = search_sharded(profile, cluster, sharding_host(native.config, npu), shipped, options)
    written = native.config.with_values(decided_values(native.config, plan.decisions, profile.modules))
    yaml = output / f"{native.config.path.stem}.planned{native.config.path.suffix}"
    write_text_atomic(yaml, written)
    write_text_atomic(output / "plan.html", render_sharded_page(plan))
    plan.write(output / "plan.json")
    say(f"plan {output / 'plan.json'}, configuration {yaml}: {plan.decisions.sizes.label()}")
