"""``plan --fsdp2``: searches the configuration of an FSDP2 trainer with computed or measured costs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.cli import _unused_flags
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json, write_together

if TYPE_CHECKING:
    from mindspeed_autoparallel.hosts.host_file import HostFile
    from mindspeed_autoparallel.profiles.sharded import ShardedProfile
    from mindspeed_autoparallel.spec.layout import Cluster
    from mindspeed_autoparallel.spec.sharded_plan import ShardedPlan


def run_sharded(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """Search and print; with ``--out`` also write ``plan.json``, the page and the configuration."""
    from mindspeed_autoparallel.cli._plan_answer import with_margin
    from mindspeed_autoparallel.hosts.opening import with_global_batch
    from mindspeed_autoparallel.planner.sharded.search import ShardedOptions, search_sharded
    from mindspeed_autoparallel.report.sharded import text_lines
    from mindspeed_autoparallel.spec.codec import to_json

    _unused_flags.refuse(
        arguments,
        (*_unused_flags.MEGATRON, *_unused_flags.MINDSPEED_FILE, *_unused_flags.MEDIA),
        "no effect with --fsdp2, whose file has the training's switches.",
    )
    file, profile = _inputs(arguments)
    cluster = _of_tensor_ranks(file, cluster)
    cluster = with_margin(arguments, profile, cluster)
    on_npu = "ascend" in profile.provenance.device.lower()
    shipped = file.decisions(profile.modules, cluster.num_devices, on_npu)
    if arguments.global_batch_size is not None:
        shipped = with_global_batch(shipped, arguments.global_batch_size)
    plan = search_sharded(
        profile,
        cluster,
        file.host(on_npu),
        shipped,
        ShardedOptions(time_limit_s=arguments.time_limit_s, top_k=arguments.top_k),
        source_files=tuple(str(path) for path in (arguments.fsdp2, arguments.model) if path is not None),
    )
    if arguments.out is not None:
        _write(arguments.out, plan, file, profile)
    if arguments.json:
        print(json.dumps(to_json(plan)))
    else:
        print("\n".join(text_lines(plan)))
    return 0


def _of_tensor_ranks(file: HostFile, cluster: Cluster) -> Cluster:
    """Return ``cluster`` with one device per tensor parallel group, whose ranks all run the same work."""
    size = file.described.tensor_size
    if cluster.devices_per_node % size:
        raise ConfigError(f"{file.path}: tensor parallelism {size} does not divide --nproc-per-node.")
    return replace(cluster, devices_per_node=cluster.devices_per_node // size)


def _write(folder: Path, plan: ShardedPlan, file: HostFile, profile: ShardedProfile) -> None:
    from mindspeed_autoparallel.report.sharded import render_sharded_page

    path = file.path
    written = file.written(plan.decisions, profile.modules)
    texts = {folder / "plan.json": plan.text(), folder / "plan.html": render_sharded_page(plan)}
    if written.text:
        texts[folder / path.name] = written.text
    if written.text and (folder / path.name).resolve() == path.resolve():
        raise ConfigError(f"--out {folder} holds {path.name} itself; choose another folder.")
    write_together(texts)
    print(f"written: {', '.join(str(path) for path in texts)}", file=sys.stderr)
    if written.words:
        print(f"add to the command line: {' '.join(written.words)}", file=sys.stderr)
    if written.left_out:
        print(f"remove from it: {' '.join(written.left_out)}", file=sys.stderr)


def _inputs(arguments: argparse.Namespace) -> tuple[HostFile, ShardedProfile]:
    from mindspeed_autoparallel.hosts.opening import open_host_file
    from mindspeed_autoparallel.profiles.sharded import ShardedProfile

    file = open_host_file(arguments.fsdp2)
    if arguments.global_batch_size is not None and file.states_batch:
        raise ConfigError(f"--global-batch-size has no meaning with --fsdp2: {file.path} states the batch.")
    measured = arguments.profile is not None
    if arguments.profile_source and measured != (arguments.profile_source == "file"):
        given = "with" if measured else "without"
        raise ConfigError(f"--profile-source {arguments.profile_source} {given} --profile: leave it out.")
    if measured:
        _unused_flags.refuse(arguments, _unused_flags.COMPUTED, "no effect with --profile, whose costs are measured.")
        return file, ShardedProfile.read(arguments.profile)
    if file.arguments and arguments.model is not None:
        raise ConfigError(f"--model has no meaning with --fsdp2 {file.path}: its flags describe the model.")
    for flag in ("device",) if file.arguments else ("model", "device"):
        if getattr(arguments, flag) is None:
            raise ConfigError(f"--fsdp2 needs --{flag}, or a measured --profile.")
    for note in file.notes:
        print(note, file=sys.stderr)
    profile = _computed(arguments, file)
    return file, replace(profile, notes=(*profile.notes, *file.notes))


def _computed(arguments: argparse.Namespace, file: HostFile) -> ShardedProfile:
    from mindspeed_autoparallel.cost.catalogue import find_device, read_device
    from mindspeed_autoparallel.predict.megatron_arguments import model_of_arguments
    from mindspeed_autoparallel.predict.sharded_profile import megatron_profile, sharded_profile

    tokens = arguments.seq_length or file.described.sequence
    if tokens < 1:
        raise ConfigError(f"{file.path} has no {file.tokens_key}; give --seq-length.")
    described = replace(file.described, sequence=tokens)
    device = find_device(arguments.device, tuple(read_device(one) for one in arguments.device_file))
    print(f"analytic: nothing was measured; costs are computed for {device.name}", file=sys.stderr)
    per_node, network = arguments.nproc_per_node, arguments.network_gbit_per_s
    if file.arguments:
        shape = model_of_arguments(file.arguments)
        return megatron_profile(shape, described, device, per_node, network_gbit_per_s=network)
    path = arguments.model / "config.json" if arguments.model.is_dir() else arguments.model
    content: Any = read_json(path, "model configuration")
    if not isinstance(content, dict):
        raise ConfigError(f"model configuration {path} must be an object.")
    return sharded_profile(content, str(path), described, device, per_node, network_gbit_per_s=network)
