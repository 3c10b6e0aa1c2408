"""Costs measured once per device and network, for all models."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.units import MAX_DURATION_US

COLLECTIVES = ("p2p", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Start-up time of one operation and the bytes per second that one rank moves over its link."""

    latency_us: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency_us <= MAX_DURATION_US or self.bytes_per_s < 1:
            raise ProfileError(
                f"latency_us must be 0 to {MAX_DURATION_US:g} and bytes_per_s at least 1, got {self.latency_us:g} and "
                f"{self.bytes_per_s:g}."
            )


@dataclass(frozen=True, kw_only=True)
class LinkTier:
    """One tier of the network: ``intra`` (inside a node) or ``inter`` (between nodes)."""

    default: Collective
    operations: dict[str, Collective] = field(default_factory=dict)
    """Measured operations (``p2p``, ``all_reduce``, ...); the others use ``default``."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.operations) - set(COLLECTIVES))
        if unknown:
            raise ProfileError(f"unknown operation {unknown[0]!r}; known: {', '.join(COLLECTIVES)}.")

    def of(self, operation: str) -> Collective:
        """Return the measured operation, or the tier's default."""
        return self.operations.get(operation, self.default)


@dataclass(frozen=True, kw_only=True)
class StageOverhead:
    """Time of a microbatch's forward and backward on a pipeline stage beyond its blocks, by the stage's position."""

    first_us: float = 0.0
    inner_us: float = 0.0
    last_us: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= overhead <= MAX_DURATION_US for overhead in (self.first_us, self.inner_us, self.last_us)):
            raise ProfileError(f"stage overhead must be 0 to {MAX_DURATION_US:g}, got {self}.")

    def at(self, stage: int, num_stages: int) -> float:
        """Return the overhead of one of several virtual stages."""
        return self.first_us if stage == 0 else self.last_us if stage == num_stages - 1 else self.inner_us


@dataclass(frozen=True, kw_only=True)
class NodeNetwork:
    """Links of a run's nodes by datasheet, for profiles without measurements. Rates are bytes per microsecond.

    Gradients are reduced over it by the formulas of ``cost.collectives.Fabric``: the ranks of a group that share a node
    share its network, too.
    """

    devices_per_node: int
    """Devices that reach each other without the network: a node's, or a rack's."""
    link_bytes_per_us: float
    """One device's links inside a node, all peers together."""
    link_latency_us: float
    inter_bytes_per_us: float
    """One node's network, all its devices together."""
    inter_latency_us: float
    mesh: bool = False
    """Whether each pair of a node's devices has a link of its own, so that few peers reach few of the links."""
    replica_fraction: float = 1.0
    """Share of a node's network that the reduction of gradients reaches if the node holds several replicas."""


@dataclass(frozen=True, kw_only=True)
class GradientExchange:
    """Bytes that gradient reduction and parameter gathering send, and the exposed share of their time."""

    network: NodeNetwork
    exposed: float = 1.0
    """Exposed share without overlap."""
    exposed_overlapped: float = 0.1
    """Exposed share if both overlap the passes; 0.09 in seven runs published on H100."""
    sent_share: float = 1.0
    """Bytes sent over bytes of the main gradients: half if fp32 gradients are reduced in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class DeviceCost:
    """One device and its links."""

    memory_capacity_bytes: int
    """Bytes that a training process may allocate."""
    runtime_overhead_bytes: int = 0
    """Context, communicator buffers, workspace, fragmentation: used, but not by tensors."""
    intra: LinkTier
    inter: LinkTier
    optimizer_step_us_per_byte: float = 0.0
    """Optimizer step per byte of parameters that this rank updates (after the distributed optimizer's split)."""
    optimizer_step_fixed_us: float = 0.0
    optimizer_peak_bytes_per_parameter_byte: float = 0.0
    """Transient of the step per byte of parameters that this rank updates."""
    operation_overhead_us: float = 0.0
    """Host time added to every forward or backward of a stage by the schedule."""
    hidden_share: float = 0.5
    """Share that counts of overlap that is only modelled, not measured; half by default."""
    message_overhead_us: float = 0.0
    """Added to every point-to-point message, in addition to the tier's latency."""
    interleaved_message_overhead_us: float | None = None
    """The same in the interleaved schedule, which posts messages and waits for them separately; ``None``: equal."""
    stage_overhead: StageOverhead = field(default_factory=StageOverhead)
    """Added to the passes of pipelines of more than one stage: half to a forward, half to a backward."""
    pipeline_step_us: float = 0.0
    """Added to the end of every step of such pipelines."""
    gradient_norm_us_per_byte: float = 0.0
    """Pass over gradients before the optimizer step, per byte of trained parameters that this rank holds."""
    exchange: GradientExchange | None = None
    """Of gradients and parameters among replicas, in computed profiles; ``None``: by the tiers."""
    peak_flops_per_s: float = 0.0
    """Dense 16-bit operations by datasheet, the reference of utilization; 0: unknown."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and value < 0:
                raise ProfileError(f"device: {name} must not be negative, got {value}.")
            if name.endswith("_us") and value is not None and value > MAX_DURATION_US:
                raise ProfileError(f"device: {name} must be at most {MAX_DURATION_US:g}, got {value:g}.")
        if self.hidden_share > 1:
            raise ProfileError(f"device: hidden_share must be at most 1, got {self.hidden_share}.")
        if self.memory_capacity_bytes <= 0:
            raise ProfileError("device: memory_capacity_bytes must be above 0.")

    def message_us(self, schedule: str) -> float:
        """Return what is added to every message of a schedule (``schedule.SCHEDULES``)."""
        own = self.interleaved_message_overhead_us
        return self.message_overhead_us if own is None or schedule != "interleaved" else own
