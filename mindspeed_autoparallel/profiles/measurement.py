"""One measured point: the costs of every block under one choice of TP, CP, EP, ETP, MBS and SP."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.profiles.blocks import ModuleCost, SharedBytes


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
    """Labels of the points this was computed from; empty when it was measured."""
