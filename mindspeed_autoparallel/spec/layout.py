"""The parallel sizes of a job, for the whole model and (hetero) per module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_autoparallel.errors import ConfigError

SCHEDULES = ("1f1b", "interleaved", "gpipe")
SENDS = ("eager", "blocking", "freed", "overlapped", "flushed", "flushed-freed")
"""How a schedule treats its messages.

``eager``: they are sent while both sides compute; no rank waits to send. ``blocking``: a rank waits for its sends and
receives before it continues. All of Megatron's non-interleaved 1F1B, and the interleaved schedule without
``overlap_p2p_comm``. ``freed``: interleaved with overlap, Megatron's default. Warm-up and cool-down block. In between,
receives are posted one step ahead. A forward's send is waited for at once because the output is freed
(``deallocate_pipeline_outputs``, always set by megatron.training; in Megatron-LM from April 2026, pull request 4047).
``overlapped``: the same, but sends are waited for one step later: older releases. ``flushed``, ``flushed-freed``: with
``overlap_p2p_comm_warmup_flush``, warm-up and cool-down overlap too.
"""


def unmet_expert_size(least_sizes: Mapping[str, int], expert_size: int) -> tuple[str, int] | None:
    """Return the first of ``least_sizes``, by what requires them, that ``expert_size`` is below; ``None`` if all are
    met."""
    return next((item for item in least_sizes.items() if expert_size < item[1]), None)


@dataclass(frozen=True, kw_only=True)
class ModuleLayout:
    """The separate sizes of one module in a hetero layout."""

    tensor_size: int = 1
    pipeline_size: int = 1
    context_size: int = 1
    data_size: int = 1
    micro_batch_scale: int = 1
    """Microbatches of the backbone per batch of the module."""

    def label(self) -> str:
        """Return ``TP2 DP4 x4``: sizes above 1, always DP, and the scale."""
        sizes = (("PP", self.pipeline_size), ("TP", self.tensor_size), ("CP", self.context_size))
        parts = [f"{short}{size}" for short, size in sizes if size > 1]
        return " ".join([*parts, f"DP{self.data_size}", f"x{self.micro_batch_scale}"])


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Megatron's FSDP: gradients, and optionally parameters, sharded over data parallel ranks like the optimizer."""

    parameters: bool
    """Whether to shard parameters (ZeRO-3), gathered layer by layer; otherwise ZeRO-2."""
    communication_unit: int = 10**9
    """Elements: half of them are gathered ahead, as many may wait for reduction. Megatron's minimum is 1e9."""

    def __post_init__(self) -> None:
        if self.communication_unit < 1:
            raise ConfigError(f"communication_unit must be at least 1 element, got {self.communication_unit}.")

    @property
    def strategy(self) -> str:
        """Return the value of ``--data-parallel-sharding-strategy``."""
        return "optim_grads_params" if self.parameters else "optim_grads"

    @property
    def label(self) -> str:
        """Return a short name for tables."""
        return "ZeRO-3" if self.parameters else "ZeRO-2"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One point of the outer search. All sizes are counts of ranks, at least 1."""

    pipeline_size: int = 1
    tensor_size: int = 1
    data_size: int = 1
    """Data-parallel replicas; tensor x context x pipeline x data = devices."""
    context_size: int = 1
    expert_size: int = 1
    """Expert-parallel size; times the ranks that share an expert, it divides tensor x data x context."""
    expert_tensor_size: int = 0
    """Tensor ranks that share an expert's matrices (ETP); 0: all of them, Megatron's default."""
    virtual_size: int = 1
    """Model chunks per pipeline rank (VPP); above 1 needs the interleaved schedule."""
    micro_batch_size: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    overlap_gradient_reduce: bool = False
    overlap_parameter_gather: bool = False
    overlap_tensor_parallel: bool = False
    """Whether tensor-parallel collectives overlap matrix products (Megatron's ``--tp-comm-overlap``); only with TP >
    1."""
    bucket_elements: int = 0
    """Parameters per bucket of reduction and gathering (``cost.buckets``); 0: Megatron's default."""
    schedule: str = "1f1b"
    microbatch_group_size: int = 0
    """Consecutive microbatches of a chunk in the interleaved schedule; 0: the number of pipeline ranks."""
    standalone_ends: bool = False
    """Whether embedding and output layer may be alone on the first and the last virtual stage (one module)."""
    sharding: Sharding | None = None
    paired: bool = False
    """Whether a forward of one microbatch overlaps a backward of another: Megatron's combined 1F1B, with EP above 1 and
    virtual stages or a single stage."""
    meets: bool = False
    """Whether all stages of 1F1B synchronize once per microbatch, for a generator with separate sizes."""
    modules: dict[str, ModuleLayout] = field(default_factory=dict)
    """Encoders and generators with separate sizes (hetero); all other modules use the sizes above."""

    def __post_init__(self) -> None:
        sizes = ("pipeline", "tensor", "data", "context", "expert", "virtual", "micro_batch")
        for name in sizes:
            if getattr(self, f"{name}_size") < 1:
                raise ConfigError(f"{name}_size must be at least 1, got {getattr(self, f'{name}_size')}.")
        if self.expert_tensor_size < 0:
            raise ConfigError(f"expert_tensor_size must be at least 0 (as TP), got {self.expert_tensor_size}.")
        if self.sharding is not None and self.pipeline_size > 1:
            raise ConfigError(f"{self.sharding.label} is modelled for one pipeline stage, got {self.pipeline_size}.")
        if self.microbatch_group_size and not self.pipeline_size <= self.microbatch_group_size:
            raise ConfigError(
                f"microbatch_group_size must be at least the pipeline size {self.pipeline_size} (or 0, which is that), "
                f"got {self.microbatch_group_size}."
            )
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"unknown schedule {self.schedule!r}; known: {', '.join(SCHEDULES)}.")

    @property
    def num_devices(self) -> int:
        """Return the number of devices that the layout occupies."""
        return self.pipeline_size * self.tensor_size * self.data_size * self.context_size

    @property
    def ranks_of_expert(self) -> int:
        """Return the number of tensor ranks that share an expert's matrices."""
        return self.expert_tensor_size or self.tensor_size

    @property
    def expert_replicas(self) -> int:
        """Return the number of ranks that hold the same experts and reduce their gradients together."""
        ranks = self.data_size * self.context_size * self.tensor_size
        return max(1, ranks // (self.expert_size * self.ranks_of_expert))

    @property
    def num_virtual_stages(self) -> int:
        """Return pipeline size times chunks per rank."""
        return self.pipeline_size * self.virtual_size

    @property
    def megatron_sizes(self) -> dict[str, int]:
        """Return the parallel sizes under the names of Megatron's arguments."""
        sizes = {
            "tensor_model_parallel_size": self.tensor_size,
            "pipeline_model_parallel_size": self.pipeline_size,
            "context_parallel_size": self.context_size,
            "expert_model_parallel_size": self.expert_size,
        }
        return {**sizes, "expert_tensor_parallel_size": self.expert_tensor_size} if self.expert_tensor_size else sizes

    def program_sizes(self, num_microbatches: int) -> tuple[str, int, int, int, int, bool]:
        """Return the arguments of ``schedule.make_program``: schedule, pipeline size, microbatches, chunks, group size,
        pairs."""
        interleaved = self.schedule == "interleaved"
        group_size = self.microbatch_group_size if interleaved else 0
        return self.schedule, self.pipeline_size, num_microbatches, self.virtual_size, group_size, self.paired

    def num_microbatches(self, global_batch_size: int) -> int:
        """Return microbatches of one step on one replica; raises ``ConfigError`` if they do not divide the batch."""
        per_round = self.data_size * self.micro_batch_size
        if global_batch_size % per_round:
            below = global_batch_size // per_round * per_round
            nearest = f"the nearest are {below} and {below + per_round}" if below else f"the least is {per_round}"
            raise ConfigError(
                f"global batch {global_batch_size} is not divisible by DP {self.data_size} x "
                f"MBS {self.micro_batch_size}; {nearest}."
            )
        return global_batch_size // per_round

    def label(self) -> str:
        """Return ``PP8 TP2 DP4 MBS1`` and all other sizes above 1, for tables and messages."""
        parts = [f"PP{self.pipeline_size}", f"TP{self.tensor_size}", f"DP{self.data_size}"]
        parts.append(f"MBS{self.micro_batch_size}")
        for short, value in (("CP", self.context_size), ("EP", self.expert_size), ("VPP", self.virtual_size)):
            if value > 1:
                parts.append(f"{short}{value}")
        if self.expert_tensor_size not in (0, self.tensor_size):
            parts.append(f"ETP{self.expert_tensor_size}")
        if self.microbatch_group_size not in (0, self.pipeline_size):
            parts.append(f"G{self.microbatch_group_size}")
        if self.sequence_parallel:
            parts.append("SP")
        if not self.distributed_optimizer:
            parts.append("no-dist-opt")
        if self.sharding is not None:
            parts.append(self.sharding.label)
        if self.paired:
            parts.append("paired")
        if self.schedule == "gpipe":
            parts.append("GPipe")
        return " | ".join([" ".join(parts), *(f"{name} {own.label()}" for name, own in self.modules.items())])


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices; links and memory of the devices are in the profile."""

    num_nodes: int
    devices_per_node: int
    memory_limit_bytes: int | None = None
    """Most bytes that a plan may use per device; ``None``: the profile's capacity."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise ConfigError(f"the memory limit must be above 0, got {self.memory_limit_bytes} bytes per device.")

    @property
    def num_devices(self) -> int:
        """Return the total number of devices."""
        return self.num_nodes * self.devices_per_node
