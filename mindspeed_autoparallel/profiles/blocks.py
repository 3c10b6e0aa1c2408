"""Cost of a block (pre, layer or post of a module) on one rank, for one microbatch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.spec.recompute import RECOMPUTE_KINDS, is_known


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

    def __post_init__(self) -> None:
        _refuse_negative(self, "state")


@dataclass(frozen=True, kw_only=True)
class RecomputeCost:
    """What one recompute kind keeps, and what it adds."""

    saved_bytes: int
    """Live bytes after the block's forward minus before it, its output included when the next block keeps it."""
    extra_backward_us: float = 0.0
    """Added to ``backward_us``: the forward that is run again."""
    forward_peak_bytes: int = 0
    """Highest live bytes during the forward, above the live bytes at its end."""
    backward_peak_bytes: int = 0
    """Highest live bytes during the backward (incoming gradient included), above the live bytes right before it, which
    include ``saved_bytes`` of this block but not the incoming gradient."""

    def __post_init__(self) -> None:
        _refuse_negative(self, "recompute")


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """Times in microseconds, sizes in bytes, of one rank and one microbatch."""

    forward_us: float
    backward_us: float
    """Without recomputation; 0 for a frozen block with nothing trainable before it."""
    recompute: dict[str, RecomputeCost]
    """By kind (``spec.recompute``): ``none`` always; others where the host offers and the profile measured them."""
    output_bytes: int = 0
    """The tensor handed to the next block, and to the next stage if the pipeline is cut here."""
    dense: StateBytes = field(default_factory=StateBytes)
    expert: StateBytes = field(default_factory=StateBytes)
    """Expert parameters of this rank: their optimizer is split over the expert data-parallel group."""
    paired_saving_us: float = 0.0
    """Of forward and backward together, left out of both times: it hides where two microbatches are paired only."""

    def __post_init__(self) -> None:
        _refuse_negative(self, "block")
        if "none" not in self.recompute:
            raise ProfileError("recompute needs the kind 'none': what the block saves as it is.")
        unknown = sorted(kind for kind in self.recompute if not is_known(kind))
        if unknown:
            raise ProfileError(f"unknown recompute kind {unknown[0]!r}; known: {', '.join(RECOMPUTE_KINDS)}.")


@dataclass(frozen=True, kw_only=True)
class SharedBytes:
    """What a forward has beside the stream of hidden states and no block owns: the batch, rotary tables, masks."""

    total_bytes: int = 0
    """Alive while the forward runs."""
    kept_bytes: int = 0
    """Of these, alive until the backward, because some operation saved them."""

    def __post_init__(self) -> None:
        _refuse_negative(self, "shared")


@dataclass(frozen=True, kw_only=True)
class ModuleCost:
    """A module is pre block, ``num_layers`` equal layers, post block."""

    layer: BlockCost
    pre: BlockCost | None = None
    post: BlockCost | None = None
    side: SharedBytes = field(default_factory=SharedBytes)
    """What every layer is given beside the hidden states; once per stage. Recomputed layers keep it."""


def _refuse_negative(value: object, what: str) -> None:
    for item in fields(value):  # type: ignore[arg-type] # every caller is a dataclass
        number = getattr(value, item.name)
        if isinstance(number, (int, float)) and number < 0:
            raise ProfileError(f"{what}: {item.name} must not be negative, got {number}.")
