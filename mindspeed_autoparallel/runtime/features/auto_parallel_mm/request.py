"""The flags of a search, checked before anything is started."""

from __future__ import annotations

import argparse
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import made_folder
from mindspeed_autoparallel.planner.candidate import Splits
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.flags import AutoParallelFlags
from mindspeed_autoparallel.runtime.features.hetero_parallel.flags import HeteroFlags
from mindspeed_autoparallel.runtime.features.measuring import (
    MeasuringRequest,
    named_device,
    needed,
    plays_ranks,
    read_measuring,
)
from mindspeed_autoparallel.runtime.features.sample_data import SampleData, read_sample_data
from mindspeed_autoparallel.runtime.flags.flag import read_flags
from mindspeed_autoparallel.runtime.flags.shared import ProfileSourceFlags
from mindspeed_autoparallel.runtime.hetero.layouts import check_script_sizes
from mindspeed_autoparallel.runtime.launch.work_dir import private_work_dir
from mindspeed_autoparallel.runtime.megatron.description import Description, describe
from mindspeed_autoparallel.runtime.megatron.fixed_sizes import FixedSizes, fixed_sizes
from mindspeed_autoparallel.runtime.megatron.hybrid import hybrid_pattern
from mindspeed_autoparallel.runtime.megatron.layout_arguments import GROUP_ARGUMENT
from mindspeed_autoparallel.runtime.megatron.mindspeed import expert_tensor_sizes, takes_layout_strings
from mindspeed_autoparallel.runtime.megatron.splits import runnable_splits
from mindspeed_autoparallel.runtime.megatron.unsearched import refuse_hybrid, refuse_sharded_parameters
from mindspeed_autoparallel.runtime.profiling.measure.structure import choices_of_layers
from mindspeed_autoparallel.spec import Cluster

_FEATURE = "--auto-parallel-mm"
_MICRO_BATCH_SIZES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class SearchRequest(MeasuringRequest):
    """The devices to measure on, and the cluster to plan for."""

    cluster_num_nodes: int
    """Nodes of the cluster to train on."""
    cluster_devices_per_node: int
    expert_size: int
    expert_tensor_sizes: tuple[int, ...]
    """Tensor ranks that share an expert, to be measured; 0: all of them."""
    sequence_parallel: bool
    distributed_optimizer: bool
    space: SpaceOptions
    """What the host can run, and the script's own switches, with which every layout is priced."""
    num_heads: tuple[int, ...]
    """Attention heads and key/value groups of every module: each must be divisible by TP."""
    time_limit_s: float
    output_dir: Path
    profile_file: Path | None
    """Plan from this profile; nothing is measured."""
    hetero_balance: str | None = None
    """With ``--hetero-parallel``: its ``--hetero-balance``; encoders' own layouts are searched, too."""
    splits: Splits | None = None
    """The splits of the model that the host can run; ``None``: all."""
    sample_data: SampleData | None = None
    """Distribution of the samples; ``None``: equal samples."""
    layer_choices: Mapping[str, tuple[Hashable, ...]] = field(default_factory=dict)
    """For models whose layers differ, by module: the choices of the script's flags for every layer."""
    fixed: FixedSizes = field(default_factory=FixedSizes)
    """Sizes that flags of the script demand, which a plan cannot change."""
    link_device: Device | None = None
    """Device whose links are assumed if one device plays all ranks; ``None``: the measuring device's own entry."""

    @property
    def cluster(self) -> Cluster:
        """Return the cluster to train on."""
        return Cluster(
            num_nodes=self.cluster_num_nodes,
            devices_per_node=self.cluster_devices_per_node,
            memory_limit_bytes=self.memory_limit_bytes,
        )

    @property
    def num_played(self) -> int:
        """Return the size of the world in which the first device plays one rank: all groups of all layouts divide it.
        0: each measured rank is a device."""
        if not self._plays or self.cluster_num_nodes * self.cluster_devices_per_node == 1:
            return 0
        ranks = [
            size
            for tensor, shared in self._tensor_sizes()
            for size in (tensor * self.context_size, (shared or tensor) * self.expert_size)
        ]
        return math.lcm(*ranks) if ranks else 0

    @property
    def _plays(self) -> bool:
        return plays_ranks(self.num_nodes, self.num_processes_per_node, self.cluster_devices_per_node)

    def points(self) -> tuple[MeasuredAt, ...]:
        """Return the (TP, MBS) to measure: all that the cluster could use and the measuring devices can run."""
        sizes = (
            MeasuredAt(
                tensor_size=tensor,
                context_size=self.context_size,
                expert_size=self.expert_size,
                micro_batch_size=micro_batch,
                sequence_parallel=self.sequence_parallel and tensor > 1,
                expert_tensor_size=shared,
            )
            for tensor, shared in self._tensor_sizes()
            for micro_batch in self._micro_batch_sizes()
        )
        return tuple(point for point in sizes if self.fixed.runs(point))

    def _tensor_sizes(self) -> Iterator[tuple[int, int]]:
        """Yield tensor sizes, each with the number of its ranks that share an expert; 0: all."""
        size = 1
        limit = self.cluster_devices_per_node if self._plays else self.num_processes_per_node
        limit = min(limit, self.cluster_devices_per_node)
        while size <= limit:
            fits_world = self._plays or self.num_measuring % (size * self.context_size) == 0
            fits_heads = all(heads % size == 0 for heads in self.num_heads)
            for shared in self.expert_tensor_sizes if size > 1 else self.expert_tensor_sizes[:1]:
                on_ranks = (shared or size) * self.expert_size
                fits_experts = self._plays or size == 1 or self.num_measuring % on_ranks == 0
                if fits_world and fits_experts and fits_heads and shared <= size:
                    yield size, shared if shared < size else 0
            size *= 2

    def _micro_batch_sizes(self) -> list[int]:
        batches = (self.global_batch_size, *self.ramp[:2])  # a size that divides two of a ramp divides all
        sizes = {*_MICRO_BATCH_SIZES, self.micro_batch_size}
        return sorted(size for size in sizes if not any(batch % size for batch in batches))


def read_request(arguments: argparse.Namespace) -> SearchRequest:
    """Check ``arguments`` and the files they name; ``ConfigError`` states what is wrong and what to do."""
    refuse_hybrid(arguments, _FEATURE)
    refuse_sharded_parameters(arguments, _FEATURE)
    flags = read_flags(AutoParallelFlags, arguments)
    description = describe(arguments)
    work_dir = Path(flags.auto_parallel_work_dir).resolve()
    devices_per_node = needed(arguments, _FEATURE, "simulated_nproc_per_node")
    measuring = read_measuring(
        arguments,
        _FEATURE,
        description,
        work_dir,
        flags.auto_parallel_memory_limit_mib,
        flags.auto_parallel_launch_timeout_s,
        cluster_devices_per_node=devices_per_node,
    )
    request = SearchRequest(
        **vars(measuring),
        cluster_num_nodes=needed(arguments, _FEATURE, "simulated_nnodes"),
        cluster_devices_per_node=devices_per_node,
        expert_size=int(getattr(arguments, "expert_model_parallel_size", 1) or 1),
        expert_tensor_sizes=expert_tensor_sizes(arguments),
        # Megatron trains experts with TP above 1 only with sequence parallelism.
        sequence_parallel=bool(arguments.sequence_parallel or getattr(arguments, "num_experts", None)),
        distributed_optimizer=bool(arguments.use_distributed_optimizer),
        space=_space(arguments, measuring),
        num_heads=_heads(arguments, description),
        time_limit_s=float(flags.auto_parallel_time_limit_s),
        output_dir=Path(flags.auto_parallel_output_dir).resolve(),
        profile_file=Path(flags.auto_parallel_profile_file) if flags.auto_parallel_profile_file else None,
        hetero_balance=_hetero_balance(arguments, description),
        splits=runnable_splits(arguments, description),
        sample_data=read_sample_data(arguments),
        layer_choices=_layer_choices(arguments, description),
        fixed=fixed_sizes(arguments, description.content),
        link_device=named_device(read_flags(ProfileSourceFlags, arguments)) if not measuring.target_device else None,
    )
    if request.target_device is not None and request.profile_file is not None:
        raise ConfigError(
            f"--auto-parallel-profile-file {request.profile_file} has the costs, and --profile-source analytic "
            "computes them: leave one out."
        )
    if request.target_device is None and request.profile_file is None:
        _check_points(request)
    private_work_dir(str(work_dir), "--auto-parallel-work-dir")
    if request.node_rank == 0:
        made_folder(request.output_dir, "--auto-parallel-output-dir")
    return request


def _space(arguments: argparse.Namespace, measuring: MeasuringRequest) -> SpaceOptions:
    no_model_file = measuring.description.model_file is None
    return SpaceOptions(
        group_sizes=hasattr(arguments, GROUP_ARGUMENT),
        standalone_ends=takes_layout_strings(arguments) and no_model_file and not hybrid_pattern(arguments),
        overlap_gradient_reduce=bool(getattr(arguments, "overlap_grad_reduce", False)),
        overlap_parameter_gather=bool(getattr(arguments, "overlap_param_gather", False)),
        bucket_elements=int(getattr(arguments, "ddp_bucket_size", None) or 0),
        least_expert_sizes=measuring.least_expert_sizes,
        ramp=measuring.ramp,
    )


def _layer_choices(arguments: argparse.Namespace, description: Description) -> dict[str, tuple[Hashable, ...]]:
    if description.model_file is not None or len(description.modules) > 1:
        return {}
    (module,) = description.modules
    choices = choices_of_layers(arguments, module.num_layers)
    return {module.name: choices} if len(set(choices)) > 1 else {}


def _check_points(request: SearchRequest) -> None:
    """Raise ``ConfigError`` if no point can run on the measuring devices."""
    if not request._plays and request.num_measuring % request.context_size:
        raise ConfigError(
            f"--context-parallel-size {request.context_size} does not divide the {request.num_measuring} "
            f"measuring devices (--nnodes {request.num_nodes} x --nproc-per-node {request.num_processes_per_node})."
        )
    if not request.points():
        experts = f" and --expert-model-parallel-size {request.expert_size}" if request.expert_size > 1 else ""
        shared = max(request.expert_tensor_sizes)
        experts += f" x --expert-tensor-parallel-size {shared}" if shared > 1 else ""
        raise ConfigError(
            f"no tensor-parallel size fits {request.num_measuring} measuring devices ("
            f"{request.num_processes_per_node} per node) with "
            f"{', '.join(map(str, request.num_heads))} attention heads{experts}: measure on more (--nproc-per-node)."
        )


def _hetero_balance(arguments: argparse.Namespace, description: Description) -> str | None:
    """Return ``--hetero-balance`` of a search that also tries separate layouts for encoders."""
    flags = read_flags(HeteroFlags, arguments)
    if not (flags.hetero_parallel or flags.auto_parallel_hetero):
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
    return flags.hetero_balance


def _heads(arguments: argparse.Namespace, description: Description) -> tuple[int, ...]:
    """Return the attention heads and key/value groups of every module that sets them."""
    heads: list[int] = []
    for module in description.modules:
        block = description.block_of(module)

        def value(name: str, block: Mapping[str, object] = block, given: bool = bool(module.keys)) -> Any:
            return block.get(name) if given else getattr(arguments, name, None)

        # Megatron's default is one group, which is ignored unless heads are grouped.
        grouped = value("group_query_attention")
        has_groups = grouped is not False if module.keys else bool(grouped)
        for key in ("num_attention_heads", *(["num_query_groups"] if has_groups else [])):
            if number := value(key):
                heads.append(int(number))
    return tuple(heads)
