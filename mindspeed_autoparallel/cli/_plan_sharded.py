"""``plan --fsdp2``: a native FSDP2 configuration, searched on computed or measured costs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json, write_together

if TYPE_CHECKING:
    from mindspeed_autoparallel.hosts.mindspeed_mm import NativeConfig
    from mindspeed_autoparallel.profiles.sharded import ShardedProfile
    from mindspeed_autoparallel.spec.cluster import Cluster
    from mindspeed_autoparallel.spec.sharded_plan import ShardedPlan

_TOKENS = "data.dataset_param.basic_parameters.cutoff_len"
_REDUCED = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
_REFUSED = ("candidate", "hetero_parallel", "mm_model", "data", "global_batch_size")


@dataclass(frozen=True)
class _Inputs:
    config: NativeConfig
    profile: ShardedProfile


def run_sharded(arguments: argparse.Namespace, cluster: Cluster) -> int:
    """Search, print, and write ``plan.json``, the page and the configuration where ``--out`` is given."""
    from mindspeed_autoparallel.hosts.mindspeed_mm_decisions import read_decisions, sharding_host
    from mindspeed_autoparallel.planner.sharded.search import ShardedOptions, search_sharded
    from mindspeed_autoparallel.report.sharded import text_lines
    from mindspeed_autoparallel.spec.codec import to_json

    for name in _REFUSED:
        if getattr(arguments, name, None):
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning with --fsdp2: the YAML says what is trained.")
    inputs = _inputs(arguments)
    config, profile = inputs.config, inputs.profile
    on_npu = "ascend" in profile.provenance.device.lower()
    shipped = read_decisions(config, profile.modules, cluster.num_devices, on_npu)
    limit_s = min(arguments.time_limit_s, 60.0)
    plan = search_sharded(
        profile,
        cluster,
        sharding_host(config, on_npu),
        shipped,
        ShardedOptions(time_limit_s=limit_s, top_k=arguments.top_k),
        source_files=tuple(str(path) for path in (arguments.fsdp2, arguments.model) if path is not None),
    )
    if arguments.out is not None:
        _write(arguments.out, plan, inputs)
    if arguments.json:
        print(json.dumps(to_json(plan)))
    else:
        print("\n".join(text_lines(plan)))
    return 0


def _write(folder: Path, plan: ShardedPlan, inputs: _Inputs) -> None:
    from mindspeed_autoparallel.hosts.mindspeed_mm_decisions import decided_values
    from mindspeed_autoparallel.report.sharded import render_sharded_page

    config = inputs.config
    written = config.with_values(decided_values(config, plan.decisions, inputs.profile.modules))
    texts = {
        folder / "plan.json": plan.text(),
        folder / "plan.html": render_sharded_page(plan),
        folder / config.path.name: written,
    }
    if (folder / config.path.name).resolve() == config.path.resolve():
        raise ConfigError(f"--out {folder} holds {config.path.name} itself; name another folder.")
    write_together(texts)
    print(f"written: {', '.join(str(path) for path in texts)}", file=sys.stderr)


def _inputs(arguments: argparse.Namespace) -> _Inputs:
    from mindspeed_autoparallel.hosts.mindspeed_mm import read_native
    from mindspeed_autoparallel.profiles.sharded import ShardedProfile

    config = read_native(arguments.fsdp2)
    if arguments.profile is not None:
        return _Inputs(config, ShardedProfile.read(arguments.profile))
    for flag in ("model", "device"):
        if getattr(arguments, flag) is None:
            raise ConfigError(f"--fsdp2 needs --{flag}, or a measured --profile.")
    return _Inputs(config, _computed(arguments, config))


def _computed(arguments: argparse.Namespace, config: NativeConfig) -> ShardedProfile:
    from mindspeed_autoparallel.cost.catalogue import find_device, read_device
    from mindspeed_autoparallel.predict.sharded_profile import Described, sharded_profile
    from mindspeed_autoparallel.profiles.sharded import ElementBytes

    path = arguments.model / "config.json" if arguments.model.is_dir() else arguments.model
    content: Any = read_json(path, "model configuration")
    if not isinstance(content, dict):
        raise ConfigError(f"model configuration {path} must be an object.")
    tokens = arguments.seq_length or config.values.integer(_TOKENS, 0)
    if tokens < 1:
        raise ConfigError(f"{config.path} has no {_TOKENS}; give --seq-length.")
    described = Described(
        sequence=tokens,
        frozen=config.frozen,
        micro_batch_size=config.sizes.micro_batch,
        bytes_of=ElementBytes(reduced=_REDUCED.get(config.sharding.reduce_dtype, 4)),
    )
    device = find_device(arguments.device, tuple(read_device(one) for one in arguments.device_file))
    print(f"analytic: nothing was measured; costs are computed for {device.name}", file=sys.stderr)
    return sharded_profile(
        content,
        str(path),
        described,
        device,
        arguments.nproc_per_node,
        network_gbit_per_s=arguments.network_gbit_per_s,
    )
