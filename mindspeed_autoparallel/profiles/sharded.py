"""Costs of a sharded training: its tree of modules in the order of forward, and the costs of each kind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.profiles.device import DeviceCost
from mindspeed_autoparallel.profiles.profile import Provenance
from mindspeed_autoparallel.spec.codec import JsonFile

SHARDED_PROFILE_FORMAT = "mindspeed-autoparallel/sharded-profile"
SHARDED_PROFILE_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CostPoint:
    """A profile point: the sizes that change the shapes of one device's tensors."""

    micro_batch_size: int = 1
    ulysses_size: int = 1
    ring_size: int = 1
    expert_size: int = 1

    def label(self) -> str:
        """Return ``MBS1 UL2 RING1 EP4``."""
        return f"MBS{self.micro_batch_size} UL{self.ulysses_size} RING{self.ring_size} EP{self.expert_size}"


@dataclass(frozen=True, kw_only=True)
class ModuleCosts:
    """One module at one point, one micro batch, one device, without the modules below it and without gathers.

    Times exclude exchanges between devices; ``..._sent_bytes`` is sent by one forward pass; a backward pass sends as
    much.
    """

    at: CostPoint
    forward_us: float
    backward_us: float
    tail_forward_us: float = 0.0
    """Work after the modules below it: the loss of the root, the norm of a decoder, the combination of experts."""
    tail_backward_us: float = 0.0
    attention_us: float = 0.0
    """Part of ``forward_us`` that recomputation skips if the outputs of attention are kept."""
    output_bytes: int = 0
    """The module's output, whose gradient lives while backward runs."""
    input_bytes: int = 0
    """The module's input, which a recomputed layer keeps and offload moves."""
    kept_bytes: int = 0
    """Saved for backward without recomputation, in addition to the input."""
    attention_bytes: int = 0
    """Part of ``kept_bytes`` that a layer keeps which recomputes all but attention."""
    forward_transient_bytes: int = 0
    """Peak of forward, above the bytes that it saves."""
    backward_transient_bytes: int = 0
    """Peak of backward above the saved bytes, with the gradients of the module's parameters."""
    made_gradient_bytes: int = 0
    """Part of ``backward_transient_bytes``: finished gradients of parameters, which a later part of the micro batch
    adds to those of the first part.
    """
    tail_kept_bytes: int = 0
    """Saved by the work after the modules below it; not in ``kept_bytes``."""
    tail_saves: bool = True
    """Whether the work after the modules below it saves any tensor, even one that is kept elsewhere; otherwise its
    backward starts no recomputation, and recomputation ends before it.
    """
    unsaved_transient_bytes: int = 0
    """Peak above the start of a forward that saves nothing (the first one of a recomputed layer, or a frozen module's);
    0: unknown.
    """
    tail_unsaved_transient_bytes: int = 0
    around_bytes: int = 0
    """Bytes that variables of the enclosing module hold while this one runs forward, without being saved."""
    unsaved_around_bytes: int = 0
    """The same if that module's forward saves nothing."""
    tail_forward_transient_bytes: int = 0
    tail_backward_transient_bytes: int = 0
    ulysses_sent_bytes: int = 0
    """Queries, keys, values and outputs that one forward pass exchanges between Ulysses ranks."""
    ring_sent_bytes: int = 0
    """Keys and values that one forward pass sends around the ring, all steps together."""
    expert_sent_bytes: int = 0
    """Token rows that one forward pass holds to send to their experts, and as many back (counted once)."""

    @property
    def unsaved_bytes(self) -> tuple[int, int] | None:
        """Return the bytes of a forward that saves nothing, before and after the end of the modules below it."""
        found = self.unsaved_transient_bytes, self.tail_unsaved_transient_bytes
        return found if any(found) else None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "at" and value < 0:
                raise ProfileError(f"{self.at.label()}: {name} must not be negative, got {value}.")


@dataclass(frozen=True, kw_only=True)
class ModuleKind:
    """Modules that run the same work on tensors of the same shapes."""

    parameters: tuple[int, ...] = ()
    """Elements of every trainable tensor of the module itself, without those of profiled modules below it."""
    frozen_parameters: tuple[int, ...] = ()
    """The same of tensors without gradients."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of ``parameters``, where known: ``fully_shard`` cuts the first dimension and pads it."""
    frozen_shapes: tuple[tuple[int, ...], ...] = ()
    costs: tuple[ModuleCosts, ...] = ()

    def __post_init__(self) -> None:
        for elements, shapes in ((self.parameters, self.shapes), (self.frozen_parameters, self.frozen_shapes)):
            if shapes and tuple(math.prod(shape) for shape in shapes) != elements:
                raise ProfileError(f"shapes {shapes} are not those of tensors of {elements} elements.")

    def at(self, point: CostPoint) -> ModuleCosts | None:
        """Return costs at ``point``, or ``None`` if the profile has none."""
        return next((costs for costs in self.costs if costs.at == point), None)


@dataclass(frozen=True, kw_only=True)
class ShardedModule:
    """One module that may be a ``fully_shard`` unit."""

    name: str
    """Its place in the model: ``model.language_model.layers.3``; the root is ``""``."""
    kind: str
    """Key of ``ShardedProfile.kinds``."""
    pattern: str
    """Pattern of it and of the modules decided with it: ``model.language_model.layers.{*}``; the root's is ``""``."""
    parent: str = ""
    """Name of the module around it."""
    is_layer: bool = False
    """Whether its activations may be recomputed or offloaded."""
    holds_experts: bool = False
    """Whether expert parallelism divides its parameters; it is a separate unit if the expert size is above 1."""
    input_requires_grad: bool = True
    """False of the root, of an embedding and of the first trainable module: torch reduces these at the end."""
    needs_backward: bool = True
    """False of a frozen tower in front of everything trainable."""
    is_head: bool = False
    """Whether it computes logits; chunked loss runs it in pieces."""
    is_tied: bool = False
    """Of an embedding: whether the head uses its table."""
    may_be_unit: bool = True
    """False if code outside uses its parameters without calling it: the hooks that gather them would not run."""


@dataclass(frozen=True, kw_only=True)
class ElementBytes:
    """Bytes of one parameter's copies."""

    sharded: int = 4
    """As the optimizer updates it."""
    gathered: int = 2
    """As forward and backward use it, and their gradients."""
    reduced: int = 4
    """As gradients are reduced."""
    optimizer: int = 8
    """Moments, together."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens reach their experts on a node."""

    once: bool = False
    """Whether a device receives a token once, however many of its experts are chosen, as kernels like DeepEP do."""
    in_order: bool = False
    """Whether tokens get the experts in turn, from a gate for benchmarks; else at random."""


KEPT_PER_LOGIT = 10
"""Logits in two bytes, their fp32 copy, and the logarithm of the softmax: what transformers' loss keeps."""
TRANSIENT_PER_LOGIT = 8
"""The gradient in fp32 and what it is computed from."""


@dataclass(frozen=True)
class LogitBytes:
    """Bytes of a loss per logit: until its backward, and during it."""

    kept: int = KEPT_PER_LOGIT
    transient: int = TRANSIENT_PER_LOGIT
    divided: bool = False
    """Whether tensor parallel ranks compute the loss of their slices of the logits; else they gather all of them."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a trainer's file fixes and a model's config.json lacks."""

    sequence: int
    """Tokens of the longest sample; 0: not in the file."""
    frozen: tuple[str, ...] = ()
    """Modules without gradients, as patterns."""
    tower_tokens: int = 1024
    """Patches of a sample's pictures, and positions of its sound."""
    micro_batch_size: int = 1
    """The file's own, beside powers of two."""
    bytes_of: ElementBytes = field(default_factory=ElementBytes)
    logits: LogitBytes = field(default_factory=LogitBytes)
    tensor_size: int = 1
    """Ranks that share every layer, as the trainer's file fixes it; costs are those of one of them."""
    sequence_parallel: bool = False
    """Whether these share the hidden state between blocks, too."""
    eager: bool = False
    """Whether attention keeps its matrices (``attn_implementation: eager``)."""
    loops_experts: bool = False
    """Whether experts run one after another, each indexed from the tensors of all."""
    routing: Routing = field(default_factory=Routing)


@dataclass(frozen=True, kw_only=True)
class HeadCost:
    """Logits of one micro batch of one sample on one device without context parallelism."""

    tokens: int
    vocabulary: int
    kept_bytes_per_logit: int = 2
    """Alive between the head's forward and its backward."""
    transient_bytes_per_logit: int = 8
    """More, while the loss is computed."""


@dataclass(frozen=True, kw_only=True)
class ShardedProfile(JsonFile):
    """Input of the planner for a model and a device; ``modules`` in the order of forward, parents first."""

    WHAT, AGAIN, ERROR = "profile of a sharded training", "Measure again with this release.", ProfileError

    model: str
    modules: tuple[ShardedModule, ...]
    kinds: dict[str, ModuleKind]
    device: DeviceCost
    provenance: Provenance
    tokens_per_sample: int
    attention_heads: tuple[int, ...]
    """Of every kind of attention: Ulysses sizes divide all of them."""
    num_experts: int = 0
    topk: int = 0
    """Experts that each token is sent to."""
    routing: Routing = field(default_factory=Routing)
    head: HeadCost | None = None
    bytes_of: ElementBytes = field(default_factory=ElementBytes)
    memory_bytes_per_s: float = 0.0
    """Of copies on the device, read and written bytes together; 0: copies of parameters cost nothing."""
    host_link_bytes_per_s: float = 0.0
    """Between a device and its host, one direction; 0: no offload."""
    optimizer_us_per_element: float = 0.0
    """Of the elements that one device updates."""
    step_us: float = 0.0
    """Fixed cost of one step."""
    notes: tuple[str, ...] = ()
    """What was assumed."""
    format: str = SHARDED_PROFILE_FORMAT
    schema_version: int = SHARDED_PROFILE_SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.modules or self.modules[0].name != "" or self.modules[0].parent != "":
            raise ProfileError("the first module of a sharded profile must be the root, named ''.")
        seen: set[str] = set()
        for module in self.modules:
            if module.name in seen:
                raise ProfileError(f"module {module.name!r} appears twice.")
            if module.name and module.parent not in seen:
                raise ProfileError(f"module {module.name!r}: its parent {module.parent!r} must be listed before it.")
            if module.kind not in self.kinds:
                raise ProfileError(f"module {module.name!r}: no kind {module.kind!r}; known: {', '.join(self.kinds)}.")
            seen.add(module.name)

    def named(self, pattern: str) -> tuple[ShardedModule, ...]:
        """Return the modules that ``pattern`` names, in order."""
        return tuple(module for module in self.modules if module.pattern == pattern)
