"""The flags of ``--auto-tuning``, checked before anything is started."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.features.apply_plan.own_run import calibration_file
from mindspeed_autoparallel.runtime.features.auto_tuning.flags import AutoTuningFlags
from mindspeed_autoparallel.runtime.features.measuring import MeasuringRequest, needed, read_measuring
from mindspeed_autoparallel.runtime.features.sample_data import SampleData, read_sample_data
from mindspeed_autoparallel.runtime.flags.flag import read_flags
from mindspeed_autoparallel.runtime.launch.work_dir import private_work_dir
from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.runtime.megatron.unsearched import refuse_hybrid, refuse_sharded_parameters
from mindspeed_autoparallel.spec import Cluster

_FEATURE = "--auto-tuning"
MINIMUM_CONTEXT_TOKENS = 1024
"""Tokens of a sequence per rank below which context parallelism is not searched: its ring would only wait."""


@dataclass(frozen=True, kw_only=True)
class TuningRequest(MeasuringRequest):
    """The model to tune, the number of devices, and the nodes that take the measurements."""

    num_ranks: int
    """Ranks of the training to tune for."""
    sequence_length: int
    num_layers: int
    num_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    num_experts: int
    knowledge_file: Path
    verify: bool
    calibration_file: Path | None
    """Device file that verified configurations calibrate."""
    log_level: str
    sample_data: SampleData | None = None
    """Distribution of the samples; ``None``: all have the sequence length."""

    @property
    def cluster(self) -> Cluster:
        """Return the cluster to tune for."""
        return Cluster(
            num_nodes=max(1, self.num_ranks // self.devices_per_node), devices_per_node=self.devices_per_node
        )

    @property
    def devices_per_node(self) -> int:
        """Return devices per node to tune for: as many as a measuring node has, or all ranks if these are fewer."""
        return min(self.num_processes_per_node, self.num_ranks)


def read_request(arguments: argparse.Namespace) -> TuningRequest:
    """Check ``arguments`` and the files they name; ``ConfigError`` states what is wrong and what to do."""
    refuse_hybrid(arguments, _FEATURE)
    refuse_sharded_parameters(arguments, _FEATURE)
    flags = read_flags(AutoTuningFlags, arguments)
    description = describe(arguments)
    if description.model_file is not None or len(description.modules) > 1:
        raise ConfigError("--auto-tuning is for language models; a multimodal model is planned by --auto-parallel-mm.")
    work_dir = private_work_dir(flags.auto_tuning_work_dir, "--auto-tuning-work-dir")
    knowledge = flags.auto_tuning_knowledge_base
    sizes = {name: needed(arguments, _FEATURE, name) for name in ("num_attention_heads", "micro_batch_size")}
    measuring = read_measuring(
        arguments,
        _FEATURE,
        description,
        work_dir,
        flags.auto_tuning_memory_limit_mib,
        flags.auto_tuning_launch_timeout_s,
    )
    request = TuningRequest(
        **vars(measuring),
        num_ranks=flags.auto_tuning_ranks,
        sequence_length=needed(arguments, _FEATURE, "seq_length"),
        num_layers=description.modules[0].num_layers,
        num_heads=sizes["num_attention_heads"],
        num_query_groups=int(_groups(arguments) or sizes["num_attention_heads"]),
        ffn_hidden_size=int(
            getattr(arguments, "ffn_hidden_size", None) or 4 * needed(arguments, _FEATURE, "hidden_size")
        ),
        num_experts=int(getattr(arguments, "num_experts", None) or 0),
        knowledge_file=Path(knowledge).resolve() if knowledge else work_dir / "knowledge.sqlite",
        verify=flags.auto_tuning_verify,
        calibration_file=calibration_file(arguments),
        log_level=flags.auto_tuning_log_level,
        sample_data=read_sample_data(arguments),
    )
    _check_sizes(request)
    return request


def _groups(arguments: Any) -> Any:
    grouped = getattr(arguments, "group_query_attention", False)
    return getattr(arguments, "num_query_groups", None) if grouped else None


def _check_sizes(request: TuningRequest) -> None:
    per_node = request.num_processes_per_node
    if request.calibration_file is not None and not request.verify:
        raise ConfigError("--auto-parallel-calibrate adds what is measured: give --auto-tuning-verify with it.")
    if request.num_ranks > per_node and request.num_ranks % per_node:
        raise ConfigError(
            f"--auto-tuning-ranks {request.num_ranks} does not fill nodes of --nproc-per-node {per_node}; the nearest "
            f"are {request.num_ranks // per_node * per_node} and {(request.num_ranks // per_node + 1) * per_node}."
        )
    if request.num_nodes > 1 and request.num_ranks < 2 * per_node:
        raise ConfigError(
            f"--auto-tuning-ranks {request.num_ranks} fits into one node of {per_node}, but --nnodes "
            f"{request.num_nodes} nodes would measure. Two nodes are sampled for the links between them, which needs "
            f"at least {2 * per_node} ranks; start one node instead."
        )
    if request.sequence_length % request.context_size:
        raise ConfigError(
            f"--seq-length {request.sequence_length} is not divisible by --context-parallel-size "
            f"{request.context_size}."
        )
