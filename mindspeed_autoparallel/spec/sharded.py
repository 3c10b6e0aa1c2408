"""A training under torch's ``fully_shard`` (FSDP2): its sizes, what is decided, and what a host accepts."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_autoparallel.errors import ConfigError

KEEP = "keep"
RECOMPUTE = "recompute"
RECOMPUTE_KEEP_ATTENTION = "recompute-keep-attention"
OFFLOAD = "offload"
RECOMPUTE_OFFLOAD = "recompute-offload"
POLICIES = (KEEP, RECOMPUTE, RECOMPUTE_KEEP_ATTENTION, OFFLOAD, RECOMPUTE_OFFLOAD)
"""What happens to a layer's activations: kept; computed again from the layer's input; the same with the outputs of
attention kept; kept with the layer's input waiting in the host's memory; computed again from such an input."""
EACH, FIRST, ALL = "each", "first", "all"
LAYER_CHOICES = (EACH, FIRST, ALL)
"""For which layers a host takes a policy: each on its own, the first ones of the model, or all or none."""
VARIANTS = ("torch", "torch-2.7", "mindspeed-mm")
"""Rules of gathering and reducing: torch's newest release, torch 2.7, and MindSpeed-MM's patched copy of 2.7."""
MEGATRON_FSDP = "megatron-fsdp"
"""The rules of Megatron-FSDP, which are its own."""


@dataclass(frozen=True, kw_only=True)
class ShardSizes:
    """How the devices divide the work. Ranks are numbered (replica, shard, ulysses, ring), the last fastest."""

    num_devices: int
    fully_shard_size: int
    """Devices that share one copy of the parameters, those of one context-parallel group among them."""
    ulysses_size: int = 1
    ring_size: int = 1
    expert_size: int = 1
    """Devices that share one layer's experts, each with whole experts; neighbours."""
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
        """Return copies of the parameters: HSDP where above 1."""
        return self.num_devices // self.fully_shard_size

    @property
    def expert_replicas(self) -> int:
        """Return copies of the experts."""
        return self.num_devices // self.experts_spread

    @property
    def global_batch_size(self) -> int:
        """Return samples of one step."""
        return self.micro_batch_size * self.accumulation * (self.num_devices // self.context_size)

    def label(self) -> str:
        """Return ``FS8 EP4 MBS1 x2``: sizes above 1 only, beside the shard size and the batch."""
        named = {"HSDP": self.replicas, "UL": self.ulysses_size, "RING": self.ring_size, "EP": self.expert_size}
        more = [f"{name}{size}" for name, size in named.items() if size > 1]
        if self.expert_size > 1 and self.expert_replicas > 1:
            more.append(f"EFS{self.expert_shard_size}")
        return " ".join([f"FS{self.fully_shard_size}", *more, f"MBS{self.micro_batch_size} x{self.accumulation}"])


@dataclass(frozen=True, kw_only=True)
class GroupChoice:
    """What is decided for the modules that one pattern names."""

    pattern: str
    """As ``model.language_model.layers.{*}``; the empty pattern is the model itself, which is always wrapped."""
    wrapped: bool = True
    """Whether each of them is a ``fully_shard`` unit; else its parameters belong to the module around it."""
    reshard_after_forward: bool = True
    forward_prefetch: int = 0
    """Units gathered ahead of the next one in forward; 0: torch's implicit order only."""
    backward_prefetch: int = 0
    """The same in backward; 0: torch's default, one unit ahead."""


@dataclass(frozen=True, kw_only=True)
class ShardedDecisions:
    """Everything that a configuration of a sharded training decides."""

    sizes: ShardSizes
    groups: tuple[GroupChoice, ...]
    """In the order of ``apply_modules``; explicit prefetch lists follow it."""
    policies: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Pattern to one of ``POLICIES`` per layer, in order; patterns that are not named keep their activations."""
    loss_chunk: int = 0
    """Tokens of which head and loss are computed at once; 0: all."""
    micro_batch_chunk: int = 0
    """Samples of a micro batch that layers of ``chunked`` run at once, each recomputed and offloaded; 0: all."""
    chunked: tuple[str, ...] = ()
    """Patterns of layers that may run so."""
    hooks: tuple[str, ...] = ()
    """Patterns of layers at whose hooks the units inside them are gathered and reduced: ``hook_modules``."""
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
        """Return the policy of the module number ``index`` (from 0) of those that ``pattern`` names."""
        layers = self.policies.get(pattern, ())
        return layers[index] if index < len(layers) else KEEP

    def group(self, pattern: str) -> GroupChoice | None:
        """Return what is decided for ``pattern``, or ``None`` where it is not wrapped."""
        return next((group for group in self.groups if group.pattern == pattern and group.wrapped), None)


@dataclass(frozen=True, kw_only=True)
class ShardingHost:
    """What a host accepts, and how it behaves where hosts differ. Read from its code by the runtime."""

    name: str
    variant: str = "torch"
    policies: tuple[str, ...] = POLICIES
    layer_choice: str = "each"
    """One of ``LAYER_CHOICES``."""
    reshard_choices: tuple[bool, ...] = (True, False)
    root_stays: bool = False
    """Whether the root's own parameters stay gathered after forward, whatever the others do."""
    last_layer_stays: bool = False
    """The same of the last layer of each stack."""
    prefetch_depths: tuple[int, ...] = (0, 1, 2)
    hybrid_shard: bool = True
    ulysses: bool = True
    ring: bool = False
    expert_parallel: bool = True
    strided_experts: bool = True
    """Whether experts of several expert ranks are cut along their second dimension, as ``Shard(1)``."""
    loss_chunks: tuple[int, ...] = (0,)
    """Chunk sizes to choose among, in tokens; 0: whole."""
    micro_batch_chunks: tuple[int, ...] = (0,)
    """The same for samples of a micro batch."""
    offload_optimizer: bool = False
    lists_units: bool = False
    """Whether its files list the modules that are units."""
    reentrant: bool = False
    """Whether recomputation calls a layer again as a whole, hooks included, as a reentrant checkpoint does."""
    relisted: tuple[str, ...] = ()
    """Patterns whose units, where any layer is recomputed, gather in backward the unit before them in this list in
    place of torch's order; a pattern of no module stands for a unit without parameters."""
    unit_elements: int = 0
    """Megatron-FSDP's unit size as shipped; 0: the host's own choice."""
    last_offload_stays: bool = True
    """Whether the input of the last offloaded layer never travels."""
    offload_copies: int = 2
    """Times the input of a kept layer travels; that of a recomputed one travels once."""

    def __post_init__(self) -> None:
        known = (*VARIANTS, MEGATRON_FSDP)
        if self.variant not in known:
            raise ConfigError(f"unknown variant {self.variant!r}; known: {', '.join(known)}.")
        if self.layer_choice not in LAYER_CHOICES:
            raise ConfigError(f"unknown layer choice {self.layer_choice!r}; known: {', '.join(LAYER_CHOICES)}.")
        if KEEP not in self.policies:
            raise ConfigError(f"{self.name}: a host that cannot keep activations is not supported.")
