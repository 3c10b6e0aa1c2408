"""The flags of a search, checked before anything is started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_autoparallel.cost.catalogue import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.analytic import asked_device
from mindspeed_autoparallel.runtime.hetero.layouts import check_script_sizes
from mindspeed_autoparallel.runtime.megatron.description import Description, describe

_MICRO_BATCH_SIZES = (1, 2, 4)


@dataclass(frozen=True)
class SearchRequest:
    """What to measure on, and what to plan for."""

    description: Description
    num_nodes: int
    num_processes_per_node: int
    node_rank: int
    master_addr: str
    master_port: int
    cluster_num_nodes: int
    cluster_devices_per_node: int
    global_batch_size: int
    context_size: int
    expert_size: int
    sequence_parallel: bool
    distributed_optimizer: bool
    micro_batch_size: int
    num_heads: tuple[int, ...]
    work_dir: Path
    memory_limit_mib: int | None
    time_limit_s: float
    launch_timeout_s: float
    profile_file: Path | None
    analytic_device: Device | None
    """The catalogue's device that costs are computed for; ``None`` where they are measured."""
    hetero_balance: str | None = None
    """With ``--hetero-parallel``: its ``--hetero-balance``; encoders' own layouts are searched, too."""

    @property
    def num_measuring_devices(self) -> int:
        """Devices that take the measurements."""
        return self.num_nodes * self.num_processes_per_node

    def points(self) -> tuple[MeasuredAt, ...]:
        """The (TP, MBS) to measure: everything the cluster could use that the measuring devices can hold."""
        return tuple(
            MeasuredAt(
                tensor_size=tensor,
                context_size=self.context_size,
                expert_size=self.expert_size,
                micro_batch_size=micro_batch,
                sequence_parallel=self.sequence_parallel and tensor > 1,
            )
            for tensor in self._tensor_sizes()
            for micro_batch in self._micro_batch_sizes()
        )

    def _tensor_sizes(self) -> Iterator[int]:
        size = 1
        limit = min(self.num_processes_per_node, self.cluster_devices_per_node)
        while size <= limit:
            fits_world = self.num_measuring_devices % (size * self.context_size) == 0
            if fits_world and all(heads % size == 0 for heads in self.num_heads):
                yield size
            size *= 2

    def _micro_batch_sizes(self) -> list[int]:
        sizes = {size for size in (*_MICRO_BATCH_SIZES, self.micro_batch_size) if self.global_batch_size % size == 0}
        return sorted(sizes)


def read_request(arguments: argparse.Namespace) -> SearchRequest:
    """Check ``arguments`` and the files they name; ``ConfigError`` says what is wrong and what to do."""
    _check_launcher()
    description = describe(arguments)
    node_rank, num_nodes = int(arguments.node_rank), int(arguments.nnodes)
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(f"--node-rank must be 0 to {num_nodes - 1} with --nnodes {num_nodes}, got {node_rank}.")
    nodes = _positive(arguments.simulated_nnodes, "--simulated-nnodes", "nodes of the cluster to train on")
    devices = _positive(arguments.simulated_nproc_per_node, "--simulated-nproc-per-node", "devices per node")
    batch = _positive(arguments.global_batch_size, "--global-batch-size", "samples per step")
    request = SearchRequest(
        description=description,
        num_nodes=num_nodes,
        num_processes_per_node=int(arguments.nproc_per_node),
        node_rank=node_rank,
        master_addr=str(arguments.master_addr),
        master_port=int(arguments.master_port),
        cluster_num_nodes=nodes,
        cluster_devices_per_node=devices,
        global_batch_size=batch,
        context_size=int(arguments.context_parallel_size or 1),
        expert_size=int(getattr(arguments, "expert_model_parallel_size", 1) or 1),
        sequence_parallel=bool(arguments.sequence_parallel),
        distributed_optimizer=bool(arguments.use_distributed_optimizer),
        micro_batch_size=int(arguments.micro_batch_size or 1),
        num_heads=_heads(arguments, description),
        work_dir=Path(arguments.auto_parallel_work_dir).resolve(),
        memory_limit_mib=arguments.auto_parallel_memory_limit_mib,
        time_limit_s=float(arguments.auto_parallel_time_limit_s),
        launch_timeout_s=float(arguments.auto_parallel_launch_timeout_s),
        profile_file=Path(arguments.auto_parallel_profile) if arguments.auto_parallel_profile else None,
        analytic_device=asked_device(arguments),
        hetero_balance=_hetero_balance(arguments, description),
    )
    if request.analytic_device is None:
        _check_points(request)
    _check_work_dir(request.work_dir)
    return request


def _check_points(request: SearchRequest) -> None:
    """The measuring devices must be able to hold what is to be measured."""
    if request.num_measuring_devices % request.context_size:
        raise ConfigError(
            f"--context-parallel-size {request.context_size} does not divide the {request.num_measuring_devices} "
            f"measuring devices (--nnodes {request.num_nodes} x --nproc-per-node {request.num_processes_per_node})."
        )
    if not request.points():
        raise ConfigError(
            f"no tensor-parallel size fits {request.num_processes_per_node} measuring devices per node with "
            f"{', '.join(map(str, request.num_heads))} attention heads."
        )


def _check_launcher() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "--auto-parallel-mm starts its own processes: start the script once per node with plain python instead of "
            "torchrun."
        )


def _positive(value: int | None, flag: str, what: str) -> int:
    if value is None:
        raise ConfigError(f"--auto-parallel-mm needs {flag} ({what}).")
    if value < 1:
        raise ConfigError(f"{flag} must be a positive integer ({what}), got {value}.")
    return int(value)


def _hetero_balance(arguments: argparse.Namespace, description: Description) -> str | None:
    """``--hetero-balance`` of a search that is to try layouts of their own for encoders."""
    if not getattr(arguments, "hetero_parallel", False):
        return None
    check_script_sizes(
        int(arguments.tensor_model_parallel_size or 1),
        int(arguments.pipeline_model_parallel_size or 1),
        int(arguments.context_parallel_size or 1),
    )
    names = [module.name for module in description.modules]
    if len(names) < 2:
        raise ConfigError(
            f"--hetero-parallel needs an encoder besides the backbone, but {description.model_file or 'the command'} "
            f"describes only {names[0]}. Search without it, or give the multimodal model with --mm-model."
        )
    return str(getattr(arguments, "hetero_balance", "local"))


def _heads(arguments: argparse.Namespace, description: Description) -> tuple[int, ...]:
    """Attention heads (and key/value groups) of every module: each must be divisible by TP."""
    heads: list[int] = []
    for module in description.modules:
        block = description.content
        for key in module.keys:
            block = block[key]
        for key in ("num_attention_heads", "num_query_groups"):
            value = block.get(key) if module.keys else getattr(arguments, key, None)
            if value:
                heads.append(int(value))
    return tuple(heads)


def _check_work_dir(work_dir: Path) -> None:
    probe = work_dir / ".writable"
    try:
        work_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe.write_text("probe")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write to the work dir {work_dir}: {error.strerror or error}. Free space there, or choose another "
            "with --auto-parallel-work-dir."
        ) from error
