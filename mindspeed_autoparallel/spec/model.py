"""A model for the planner: its modules in order, each with a number of equal layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.errors import ConfigError

MAX_LAYERS = 4096
GENERATOR = "_generator"
"""Suffix of the name of a module after the backbone."""
RESULT_KEYS = {"image_encoder": "vit", "text_decoder": "llm", "audio_encoder": "audio", "image_generator": "generator"}


def each_after_all(predecessors: Mapping[Any, Iterable[Any]]) -> bool:
    """Return whether each key depends on all keys before it; ``predecessors``: those on which it depends directly."""
    before: dict[Any, set[Any]] = {}
    for key, direct in predecessors.items():
        read = set(direct).union(*(before[one] for one in direct))
        if len(read) < len(before):
            return False
        before[key] = read
    return True


@dataclass(frozen=True, kw_only=True)
class Module:
    """A stack of equal layers between an optional pre block (embedding) and post block (projector, head and loss)."""

    name: str
    """``image_encoder``, ``audio_encoder``, ``text_decoder``, ..."""
    result_key: str
    """Prefix in the result file: ``vit``, ``llm``, ``audio``, ..."""
    num_layers: int
    frozen: bool = False
    hidden_size: int = 0
    tokens_per_sample: int = 0
    """Sequence length of this module for one sample."""
    num_heads: int = 0
    num_kv_heads: int = 0
    num_experts: int = 0
    predecessors: tuple[str, ...] = ()
    """Modules whose output this one reads; two modules without any form parallel branches."""
    deepstack_layers: int = 0
    """Number of first layers of the reading module that add features of this module's layers (deepstack); hosts do not
    send those features to another stage."""

    def __post_init__(self) -> None:
        if not self.name or not self.result_key:
            raise ConfigError("a module needs a name and a result_key.")
        if not 1 <= self.num_layers <= MAX_LAYERS:
            raise ConfigError(f"{self.name}: num_layers must be 1 to {MAX_LAYERS}, got {self.num_layers}.")
        sizes = ("hidden_size", "tokens_per_sample", "num_heads", "num_kv_heads", "num_experts", "deepstack_layers")
        for name in sizes:
            if getattr(self, name) < 0:
                raise ConfigError(f"{self.name}: {name} must not be negative, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The modules in pipeline order: a module comes after all its predecessors."""

    name: str
    modules: tuple[Module, ...]
    sequence_length: int
    """Tokens per sample of the text decoder, used for throughput."""
    vocab_size: int = 0
    tied_embeddings: bool = False
    """The head shares the embedding's weight; first and last stage reduce its gradient together."""
    num_parameters: int = 0
    """Total over the whole model; checked against the built model."""
    num_active_parameters: int = 0
    """Parameters used per token (for experts, those it is routed to); 0: unknown."""
    operations_per_sample: float = 0.0
    """Floating point operations to train on one sample, forward and backward, without recompute; 0: unknown."""

    def __post_init__(self) -> None:
        if not self.modules:
            raise ConfigError("the model has no modules.")
        seen: set[str] = set()
        keys: set[str] = set()
        for module in self.modules:
            if module.name in seen or module.result_key in keys:
                raise ConfigError(f"module {module.name!r} (result key {module.result_key!r}) appears twice.")
            for before in module.predecessors:
                if before not in seen:
                    raise ConfigError(f"{module.name}: predecessor {before!r} must be listed before it.")
            seen.add(module.name)
            keys.add(module.result_key)
        for encoder, reader in self.deepstacks():
            if encoder.deepstack_layers > reader.num_layers:
                raise ConfigError(
                    f"{encoder.name} gives features to {encoder.deepstack_layers} layers (deepstack), and "
                    f"{reader.name} has {reader.num_layers}."
                )
        if self.sequence_length < 1:
            raise ConfigError(f"sequence_length must be at least 1, got {self.sequence_length}.")

    @property
    def is_chain(self) -> bool:
        """Return whether each module depends on all modules before it."""
        return each_after_all({module.name: module.predecessors for module in self.modules})

    @property
    def num_layers(self) -> int:
        """Return layers of all modules together."""
        return sum(module.num_layers for module in self.modules)

    @property
    def num_parts(self) -> int:
        """Return the number of parts that the layers can be cut into: the end of an encoder and the layers that add its
        features are one part."""
        return self.num_layers - sum(encoder.deepstack_layers for encoder, _ in self.deepstacks())

    def deepstacks(self) -> list[tuple[Module, Module]]:
        """Return pairs of a module with deepstack features and the module whose first layers add them."""
        found = []
        for encoder in self.modules:
            readers = [module for module in self.modules if encoder.name in module.predecessors]
            if encoder.deepstack_layers and not readers:
                raise ConfigError(f"{encoder.name}: deepstack_layers needs a module that reads it.")
            found += [(encoder, reader) for reader in readers if encoder.deepstack_layers]
        return found

    def module(self, name: str) -> Module:
        """Return the module of that name; ``ConfigError`` names the known ones."""
        for module in self.modules:
            if module.name == name:
                return module
        raise ConfigError(f"no module {name!r}; the model has {', '.join(module.name for module in self.modules)}.")


@dataclass(frozen=True)
class DecoderSizes:
    """Counts and widths in elements."""

    num_layers: int
    """Layers of the decoder, without no-op layers."""
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    """Width of an MLP; also of an expert, unless given separately."""
    vocabulary: int
    gated: bool = True
    """Whether the MLP has a gate projection in addition to the up projection."""
    num_experts: int = 0
    topk: int = 0
    """Experts per token."""
    head_size: int = 0
    """Width of a head; 0: hidden / heads."""

    @property
    def head_width(self) -> int:
        """Return the width of one head."""
        return self.head_size or self.hidden // self.heads

    @property
    def query_size(self) -> int:
        """Return the total width of all query heads."""
        return self.heads * self.head_width

    @property
    def kv_size(self) -> int:
        """Return the total width of all key heads, equal to that of the value heads."""
        return self.kv_heads * self.head_width
