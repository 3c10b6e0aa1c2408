"""``--auto-parallel-mm`` in the native trainer: measure in place of training, search, write, and end."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.files import made_folder, write_text_atomic
from mindspeed_autoparallel.hosts.mindspeed_mm_decisions import decided_values, read_decisions, sharding_host
from mindspeed_autoparallel.hosts.yaml_edit import Value
from mindspeed_autoparallel.profiles.sharded import ShardedProfile
from mindspeed_autoparallel.runtime.devices.selection import current_device
from mindspeed_autoparallel.runtime.first_rank import is_first_rank
from mindspeed_autoparallel.runtime.fsdp2.flags import NativeRequest
from mindspeed_autoparallel.runtime.fsdp2.measuring import measure_steps
from mindspeed_autoparallel.runtime.fsdp2.modules import FoundModules, find_modules
from mindspeed_autoparallel.runtime.fsdp2.profile import sharded_profile
from mindspeed_autoparallel.runtime.fsdp2.trainer import NativeTrainer, before_sharding, end_with, say
from mindspeed_autoparallel.spec.layout import Cluster

_WHILE_MEASURING: dict[str, Value] = {
    "features.recompute": False,
    "features.enable_activation_offload": False,
    "features.enable_chunk_mbs": False,
    "features.enable_chunk_loss": False,
    "parallel.fsdp_plan.num_to_forward_prefetch": 0,
    "parallel.fsdp_plan.num_to_backward_prefetch": 0,
    "training.gradient_accumulation_steps": 1,
}
"""Settings of the measurement: the features that a plan decides are off."""


def prepare_search(native: NativeTrainer, request: NativeRequest) -> None:
    """Replace the trainer's ``train``: measure the model, search, write the results, and end the process."""
    if is_first_rank():
        _folders(request)
    native.set_values(_WHILE_MEASURING)
    found: list[FoundModules] = []
    before_sharding(native, lambda model: found.append(find_modules(model, native.config)))
    trainer_class = native.module.Trainer

    @functools.wraps(trainer_class.train)
    def measure_and_end(trainer: Any) -> None:
        try:
            profile = _measured(trainer, native, found[-1])
            if is_first_rank():
                plan_and_write(native, request, profile)
        except AutoParallelError as error:
            end_with(error)
        sys.exit(0)

    trainer_class.train = measure_and_end


def _folders(request: NativeRequest) -> tuple[Path, Path]:
    """Return the folder of the profile and that of plan and YAML, created if missing."""
    search = request.search
    work = made_folder(Path(search.auto_parallel_work_dir), "--auto-parallel-work-dir")
    return work, made_folder(Path(search.auto_parallel_output_dir), "--auto-parallel-output-dir")


def _measured(trainer: Any, native: NativeTrainer, found: FoundModules) -> ShardedProfile:
    device = current_device()
    trainer.model.train()
    steps = measure_steps(trainer, native, found, device)
    sizes = ", ".join(str(step.at.micro_batch_size) for step in steps)
    say(f"measured {len(found.modules)} modules of {len(found.kinds)} kinds at micro batch {sizes}")
    return sharded_profile(trainer, native, found, steps, device)


def plan_and_write(native: NativeTrainer, request: NativeRequest, profile: ShardedProfile) -> None:
    """Search for the cluster of ``request``, and write profile, plan, page and YAML."""
    # Importing OR-Tools takes most of a second.
    from mindspeed_autoparallel.planner.sharded.search import ShardedOptions, search_sharded
    from mindspeed_autoparallel.report.sharded import render_sharded_page

    work, output = _folders(request)
    profile.write(work / "sharded_profile.json")
    cluster = Cluster(
        num_nodes=request.num_nodes,
        devices_per_node=request.devices_per_node,
        memory_limit_bytes=request.memory_limit_bytes,
    )
    npu = current_device().name == "npu"
    shipped = read_decisions(native.config, profile.modules, cluster.num_devices, npu)
    options = ShardedOptions(time_limit_s=float(request.search.auto_parallel_time_limit_s))
    plan = search_sharded(profile, cluster, sharding_host(native.config, npu), shipped, options)
    written = native.config.with_values(decided_values(native.config, plan.decisions, profile.modules))
    yaml = output / f"{native.config.path.stem}.planned{native.config.path.suffix}"
    write_text_atomic(yaml, written)
    write_text_atomic(output / "plan.html", render_sharded_page(plan))
    plan.write(output / "plan.json")
    say(f"plan {output / 'plan.json'}, configuration {yaml}: {plan.decisions.sizes.label()}")
