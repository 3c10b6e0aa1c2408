"""A training under torch's ``fully_shard`` (FSDP2): its sizes, its decisions, and the capabilities of a host."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_autoparallel.errors import ConfigError

KEEP = "keep"
RECOMPUTE = "recompute"
RECOMPUTE_KEEP_ATTENTION = "recompute-keep-attention"
OFFLOAD = "offload"
RECOMPUTE_OFFLOAD = "recompute-offload"
POLICIES = (KEEP, RECOMPUTE, RECOMPUTE_KEEP_ATTENTION, OFFLOAD, RECOMPUTE_OFFLOAD)
"""Treatment of a layer's activations: keep them; recompute them from the layer's input; the same but keep the outputs
of attention; keep them with the layer's input offloaded to the host; recompute them from an offloaded input."""
EACH, FIRST, ALL = "each", "first", "all"
LAYER_CHOICES = (EACH, FIRST, ALL)
"""Layers for which a host accepts a policy: each separately, the first ones of the model, or all or none."""
VARIANTS = ("torch", "torch-2.7", "mindspeed-mm")
"""Rules of gathering and reducing: torch's newest release, torch 2.7, and MindSpeed-MM's patched copy of 2.7."""
MEGATRON_FSDP = "megatron-fsdp"
"""The rules of Megatron-FSDP, which are its own."""


@dataclass(frozen=True, kw_only=True)
class ShardSizes:
    """The division of work among devices. Ranks are numbered (replica, shard, ulysses, ring), the last fastest."""

    num_devices: int
    fully_shard_size: int
    """Devices that share one copy of the parameters, including those of a context-parallel group."""
    ulysses_size: int = 1
    ring_size: int = 1
    expert_size: int = 1
    """Neighbouring devices that share one layer's experts, each with whole experts."""
    expert_shard_size: int = 1
    """Devices, ``expert_size`` apart, that share the parameters of the same experts."""
    micro_batch_size: int = 1
    accumulation: int = 1
    """Micro batches per step and device."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        for name in ("fully_shard_size", "context_size", "experts_spread"):
            value = getattr(self, name)
            if self.num_devices % value:
                raise ConfigError(f"{name.replace('_', ' ')} {value} does not divide {self.num_devices} devices.")
        if self.fully_shard_size % self.context_size:
            raise ConfigError(
                f"ulysses {self.ulysses_size} x ring {self.ring_size} does not divide the fully_shard size "
                f"{self.fully_shard_size}."
            )

    @property
    def context_size(self) -> int:
        """Return devices that share one sample's tokens."""
        return self.ulysses_size * self.ring_size

    @property
    def experts_spread(self) -> int:
        """Return devices among which one layer's experts are divided, by expert and by shard."""
        return self.expert_size * self.expert_shard_size

    @property
    def replicas(self) -> int:
        """Return the number of parameter replicas: HSDP if above 1."""
        return self.num_devices // self.fully_shard_size

    @property
    def expert_replicas(self) -> int:
        """Return the number of expert replicas."""
        return self.num_devices // self.experts_spread

    @property
    def global_batch_size(self) -> int:
        """Return the samples per step."""
        return self.micro_batch_size * self.accumulation * (self.num_devices // self.context_size)

    def label(self) -> str:
        """Return ``FS8 EP4 MBS1 x2``: shard size, batch, and other sizes above 1."""
        named = {"HSDP": self.replicas, "UL": self.ulysses_size, "RING": self.ring_size, "EP": self.expert_size}
        more = [f"{name}{size}" for name, size in named.items() if size > 1]
        if self.expert_size > 1 and self.expert_replicas > 1:
            more.append(f"EFS{self.expert_shard_size}")
        return " ".join([f"FS{self.fully_shard_size}", *more, f"MBS{self.micro_batch_size} x{self.accumulation}"])


@dataclass(frozen=True, kw_only=True)
class GroupChoice:
    """The decisions for the modules that match one pattern."""

    pattern: str
    """Such as ``model.language_model.layers.{*}``; the empty pattern is the model itself, which is always wrapped."""
    wrapped: bool = True
    """Whether each of them is a ``fully_shard`` unit; otherwise its parameters belong to the enclosing unit."""
    reshard_after_forward: bool = True
    forward_prefetch: int = 0
    """Units gathered ahead of the next one in forward; 0: torch's implicit order only."""
    backward_prefetch: int = 0
    """The same in backward; 0: torch's default, one unit ahead."""


@dataclass(frozen=True, kw_only=True)
class ShardedDecisions:
    """All decisions in the configuration of a sharded training."""

    sizes: ShardSizes
    groups: tuple[GroupChoice, ...]
    """Groups in the order of ``apply_modules``, which explicit prefetch lists follow."""
    policies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Pattern to one of ``POLICIES`` per layer, in order; layers of other patterns keep their activations."""
    loss_chunk: int = 0
    """Tokens per chunk of head and loss; 0: all."""
    micro_batch_chunk: int = 0
    """Samples of a micro batch that the layers ``chunked`` run at once, recomputed and offloaded; 0: all."""
    chunked: tuple[str, ...] = ()
    """Patterns of layers that may run in such chunks."""
    hooks: tuple[str, ...] = ()
    """Patterns of layers whose hooks gather and reduce the units inside them: ``hook_modules``."""
    offload_optimizer: bool = False
    """Whether parameters and optimizer state wait in the host's memory."""
    unit_elements: int = 0
    """Megatron-FSDP's unit size; 0: the host's own choice."""

    def __post_init__(self) -> None:
        for pattern, layers in self.policies.items():
            unknown = sorted(set(layers) - set(POLICIES))
            if unknown:
                raise ConfigError(f"{pattern}: unknown policy {unknown[0]!r}; known: {', '.join(POLICIES)}.")

    def policy(self, pattern: str, index: int) -> str:
        """Return the policy of the ``index``-th module (from 0) that matches ``pattern``."""
        layers = self.policies.get(pattern, ())
        return layers[index] if index < len(layers) else KEEP

    def group(self, pattern: str) -> GroupChoice | None:
        """Return the decisions for ``pattern``, or ``None`` if it is not wrapped."""
        return next((group for group in self.groups if group.pattern == pattern and group.wrapped), None)


@dataclass(frozen=True, kw_only=True)
class ShardingHost:
    """The capabilities of a host, and its behaviour where hosts differ. The runtime reads both from its code."""

    name: str
    variant: str = "torch"
    policies: tuple[str, ...] = POLICIES
    layer_choice: str = "each"
    """One of ``LAYER_CHOICES``."""
    reshard_choices: tuple[bool, ...] = (True, False)
    root_stays: bool = False
    """Whether the root's parameters always stay gathered after forward."""
    last_layer_stays: bool = False
    """Whether the last layer of each stack always stays gathered after forward."""
    prefetch_depths: tuple[int, ...] = (0, 1, 2)
    hybrid_shard: bool = True
    ulysses: bool = True
    ring: bool = False
    expert_parallel: bool = True
    strided_experts: bool = True
    """Whether experts of several expert ranks are cut along their second dimension, as ``Shard(1)``."""
    defers_reduction: bool = False
    """Whether gradients wait, unsharded, for the last micro batch of a step, which alone reduces them."""
    stays_gathered: bool = False
    """Whether backward frees parameters in the last micro batch alone."""
    ignores_whole_experts: bool = False
    """Whether experts that are divided by expert parallelism alone are no parameters of ``fully_shard``."""
    loss_chunks: tuple[int, ...] = (0,)
    """Chunk sizes to choose among, in tokens; 0: whole."""
    micro_batch_chunks: tuple[int, ...] = (0,)
    """The same for samples of a micro batch."""
    offload_optimizer: bool = False
    lists_units: bool = False
    """Whether its files list the units' modules."""
    reentrant: bool = False
    """Whether recomputation calls the whole layer again, including hooks, as a reentrant checkpoint does."""
    relisted: tuple[str, ...] = ()
    """Patterns whose units, where any layer is recomputed, gather in backward the unit before them in this list in
    place of torch's order; a pattern of no module stands for a unit without parameters."""
    unit_elements: int = 0
    """Megatron-FSDP's unit size as shipped; 0: the host's own choice."""
    last_offload_stays: bool = True
    """Whether the input of the last offloaded layer stays on the device."""
    offload_copies: int = 2
    """Number of copies of a kept layer's input; a recomputed layer's input is copied once."""

    def __post_init__(self) -> None:
        known = (*VARIANTS, MEGATRON_FSDP)
        if self.variant not in known:
            raise ConfigError(f"unknown variant {self.variant!r}; known: {', '.join(known)}.")
        if self.layer_choice not in LAYER_CHOICES:
            raise ConfigError(f"unknown layer choice {self.layer_choice!r}; known: {', '.join(LAYER_CHOICES)}.")
        if KEEP not in self.policies:
            raise ConfigError(f"{self.name}: a host that cannot keep activations is not supported.")
