"""Cost of a block (pre, layer or post of a module) on one rank, for one microbatch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.spec.recompute import RECOMPUTE_KINDS, is_known
from mindspeed_autoparallel.units import MAX_DURATION_US


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Model state of a block on one rank, before any split over the data-parallel group."""

    num_parameters: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    """The main gradients that live for the whole step (fp32: 4 per parameter); 0 when frozen."""
    optimizer_bytes: int = 0
    """Master weights and moments that a distributed optimizer splits over DP x CP; whole, before the split."""
    optimizer_unshardable_bytes: int = 0
    """Optimizer state that every replica keeps."""
    copy_bytes: int = 0
    """Further parameters that are neither trained nor gathered: frozen matrices of a run with adapters, a preference
    training's reference, eight-bit copies.
    """

    def __post_init__(self) -> None:
        _check_sizes(self, "state")


@dataclass(frozen=True, kw_only=True)
class RecomputeCost:
    """Memory and time of one recompute kind."""

    saved_bytes: int
    """Live bytes after the block's forward minus before it, with its output if the next block keeps it."""
    extra_backward_us: float = 0.0
    """Added to ``backward_us``: the forward that is run again."""
    forward_peak_bytes: int = 0
    """Highest live bytes during the forward, above the live bytes at its end."""
    backward_peak_bytes: int = 0
    """Highest live bytes during the backward (incoming gradient included), above the live bytes right before it, which
    include ``saved_bytes`` of this block but not the incoming gradient."""

    def __post_init__(self) -> None:
        _check_sizes(self, "recompute")


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """Times in microseconds, sizes in bytes, of one rank and one microbatch."""

    forward_us: float
    backward_us: float
    """Backward time without recomputation; 0 for a frozen block with nothing trainable before it."""
    recompute: dict[str, RecomputeCost]
    """By kind (``spec.recompute``): ``none`` always; others if the host has them and the profile measured them."""
    output_bytes: int = 0
    """The tensor passed to the next block, or sent to the next stage if the stage ends here."""
    dense: StateBytes = field(default_factory=StateBytes)
    expert: StateBytes = field(default_factory=StateBytes)
    """Expert parameters of this rank: their optimizer is split over the expert data-parallel group."""
    forward_exchange_us: float = 0.0
    """All-to-alls of tokens between experts, part of ``forward_us``; 0 if unknown."""
    backward_exchange_us: float = 0.0

    def __post_init__(self) -> None:
        _check_sizes(self, "block")
        if "none" not in self.recompute:
            raise ProfileError("recompute needs the kind 'none', the block without recomputation.")
        unknown = sorted(kind for kind in self.recompute if not is_known(kind))
        if unknown:
            raise ProfileError(f"unknown recompute kind {unknown[0]!r}; known: {', '.join(RECOMPUTE_KINDS)}.")


@dataclass(frozen=True, kw_only=True)
class SharedBytes:
    """Tensors of a forward besides the hidden states that belong to no block: the batch, rotary tables, masks."""

    total_bytes: int = 0
    """Alive while the forward runs."""
    kept_bytes: int = 0
    """Of these, alive until the backward, because some operation saved them."""

    def __post_init__(self) -> None:
        _check_sizes(self, "shared")


@dataclass(frozen=True, kw_only=True)
class ModuleCost:
    """A module is pre block, ``num_layers`` layers, post block."""

    layer: BlockCost
    """Cost of every layer; if layers differ, of the mean layer."""
    pre: BlockCost | None = None
    post: BlockCost | None = None
    prediction: BlockCost | None = None
    """Layers of multi-token prediction, all of them, between the layers and ``post``, which has their logits and loss;
    its output is theirs and that of the last layer. ``None`` if ``post`` includes them, as in measured profiles."""
    side: SharedBytes = field(default_factory=SharedBytes)
    """Inputs of every layer besides the hidden states; once per stage. Recomputed layers keep them."""
    tied_copy: StateBytes = field(default_factory=StateBytes)
    """Of ``post``: its copy of the embedding, which a pipeline of one stage does not have."""
    input_bytes: int = 0
    """Inputs of the whole module: an encoder's share of the batch. 0 if not measured."""
    rows_bytes: int = 0
    """Decoder rows that a generator receives. 0: as much as its first block's output."""
    kinds: tuple[BlockCost, ...] = ()
    """Costs by kind of layer if layers differ, such as dense ones before those with experts."""
    pattern: tuple[int, ...] = ()
    """Index into ``kinds`` of every layer."""

    def __post_init__(self) -> None:
        if bool(self.kinds) != bool(self.pattern) or any(not 0 <= kind < len(self.kinds) for kind in self.pattern):
            raise ProfileError(f"pattern {self.pattern} does not name one of {len(self.kinds)} kinds for every layer.")

    @property
    def distinct_layers(self) -> tuple[BlockCost, ...]:
        """Return one layer of every kind."""
        return self.kinds or (self.layer,)

    def runs(self, start: int, count: int) -> list[tuple[BlockCost, int]]:
        """Return layers ``start`` to ``start + count``: equal ones in a row, and how many."""
        if not self.kinds:
            return [(self.layer, count)] if count else []
        rows = itertools.groupby(self.pattern[start : start + count])
        return [(self.kinds[kind], len(list(row))) for kind, row in rows]

    def parts(self, num_layers: int) -> Iterator[tuple[str, BlockCost, int]]:
        """Yield ``pre``, a run of ``layer`` per row of equal layers, ``prediction``, ``post``; and how many of each."""
        if self.pre is not None:
            yield "pre", self.pre, 1
        for layer, number in self.runs(0, num_layers):
            yield "layer", layer, number
        if self.prediction is not None:
            yield "prediction", self.prediction, 1
        if self.post is not None:
            yield "post", self.post, 1

    def with_layers(self, change: Callable[[str, BlockCost], BlockCost]) -> ModuleCost:
        """Return the module with ``change`` applied to every kind of layer, given the name of its block."""
        if not self.kinds:
            return replace(self, layer=change(layer_block(0), self.layer))
        kinds = tuple(change(layer_block(kind), cost) for kind, cost in enumerate(self.kinds))
        return replace(self, layer=mean_layer(kinds, self.pattern), kinds=kinds)


def layer_block(kind: int) -> str:
    """Name of the block of a kind of layers: ``layer``, ``layer:1``, ``layer:2``."""
    return f"layer:{kind}" if kind else "layer"


def mean_layer(kinds: Sequence[BlockCost], pattern: Sequence[int]) -> BlockCost:
    """Return times and bytes of the mean layer; a transient is the largest of all kinds."""
    shares = [pattern.count(kind) / len(pattern) for kind in range(len(kinds))]

    def mean(values: Iterable[float]) -> float:
        return sum(share * value for share, value in zip(shares, values, strict=True))

    def state(states: Sequence[StateBytes]) -> StateBytes:
        return StateBytes(
            **{item.name: round(mean(getattr(state, item.name) for state in states)) for item in fields(StateBytes)}
        )

    known = [name for name in kinds[0].recompute if all(name in kind.recompute for kind in kinds)]
    costs = {name: [kind.recompute[name] for kind in kinds] for name in known}
    return BlockCost(
        forward_us=mean(kind.forward_us for kind in kinds),
        backward_us=mean(kind.backward_us for kind in kinds),
        recompute={
            name: RecomputeCost(
                saved_bytes=round(mean(cost.saved_bytes for cost in found)),
                extra_backward_us=mean(cost.extra_backward_us for cost in found),
                forward_peak_bytes=max(cost.forward_peak_bytes for cost in found),
                backward_peak_bytes=max(cost.backward_peak_bytes for cost in found),
            )
            for name, found in costs.items()
        },
        output_bytes=max(kind.output_bytes for kind in kinds),
        dense=state([kind.dense for kind in kinds]),
        expert=state([kind.expert for kind in kinds]),
        forward_exchange_us=mean(kind.forward_exchange_us for kind in kinds),
        backward_exchange_us=mean(kind.backward_exchange_us for kind in kinds),
    )


def _check_sizes(value: object, what: str) -> None:
    for item in fields(value):  # type: ignore[arg-type] # every caller is a dataclass
        number = getattr(value, item.name)
        if isinstance(number, (int, float)) and number < 0:
            raise ProfileError(f"{what}: {item.name} must not be negative, got {number}.")
        if item.name.endswith("_us") and number > MAX_DURATION_US:
            raise ProfileError(f"{what}: {item.name} must be at most {MAX_DURATION_US:g}, got {number:g}.")


@dataclass(frozen=True, kw_only=True, order=True)
class MeasuredAt:
    """The sizes that change what one rank computes for one microbatch."""

    tensor_size: int = 1
    context_size: int = 1
    expert_size: int = 1
    micro_batch_size: int = 1
    sequence_parallel: bool = False
    expert_tensor_size: int = 0
    """Tensor ranks that share an expert's matrices; 0: all of them."""

    def __post_init__(self) -> None:
        for name in ("tensor_size", "context_size", "expert_size", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ProfileError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.expert_tensor_size < 0:
            raise ProfileError(f"expert_tensor_size must be at least 0 (as TP), got {self.expert_tensor_size}.")

    def label(self) -> str:
        """Return ``TP4 CP1 EP1 MBS1 SP`` for messages."""
        label = f"TP{self.tensor_size} CP{self.context_size} EP{self.expert_size} MBS{self.micro_batch_size}"
        label += f" ETP{self.expert_tensor_size}" if self.expert_tensor_size else ""
        return label + " SP" if self.sequence_parallel else label


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Costs of every module at one point."""

    at: MeasuredAt
    modules: dict[str, ModuleCost]
    """By module name; every module of the model."""
    batch: SharedBytes = field(default_factory=SharedBytes)
    """The data of a microbatch, which every stage loads; ``kept_bytes`` are part of the first block's saved bytes."""
    workspace_bytes: int = 0
    """Buffers that the host keeps from microbatch to microbatch for all blocks together, on every stage."""
    interpolated_from: tuple[str, ...] = ()
    """Labels of the points that this was computed from; empty if it was measured."""
