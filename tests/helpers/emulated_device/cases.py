"""What to run: shape of the pipeline, times by virtual stage, and how Megatron is configured. Pure data, JSON both ways."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step on the emulated device. Virtual stage ``v`` is chunk ``v // pipeline_size`` of rank ``v % pipeline_size``."""

    pipeline_size: int
    num_microbatches: int
    forward_ns: list[list[int]]
    """By virtual stage, by microbatch."""
    backward_ns: list[list[int]]
    link_ns: list[int]
    """Between virtual stages v and v + 1, either direction."""
    virtual_size: int = 1
    microbatch_group_size: int | None = None
    overlap: bool = True
    """Of the interleaved schedule: messages beside computation (``overlap_p2p_comm``), Megatron's default."""
    warmup_flush: bool = False
    """``overlap_p2p_comm_warmup_flush``."""
    free_outputs: bool = True
    """``deallocate_pipeline_outputs``, which megatron.training always sets."""
    blocks: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """By virtual stage, in order: (saved bytes, forward transient, backward transient) of a block."""
    paired: bool = False
    """Combined 1F1B (``overlap_moe_expert_parallel_comm``)."""
    saving_ns: list[list[int]] = field(default_factory=list)
    """By virtual stage of a forward and of the backward that it is paired with: what both take less than alone."""
    has_ends: bool = False
    """Of ``paired``: the very first block is an embedding, the very last an output layer, and neither is a layer."""
    dualpipev: str = ""
    """A MindSpeed checkout, whose schedule runs two chunks per rank in the shape of a V: stage v is that of the chain."""
    before_sync_ns: list[int] = field(default_factory=list)
    """By rank: after its last backward (gradient reduction), before all ranks meet (the norm of the gradients)."""
    after_sync_ns: list[int] = field(default_factory=list)
    """By rank: the optimizer step."""
    sleeping: bool = False
    """Compute by sleeping in real time over plain gloo, without links: checks the virtual clock itself."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Case:
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened."""

    step_ns: int
    """Until the last rank was done, optimizer step included."""
    pipeline_ns: int
    """Until the last rank left the schedule."""
    orders: list[list[tuple[str, int, int]]]
    """By rank: (F or B, chunk, microbatch) in the order of Megatron's calls."""
    busy_ns: list[int]
    """By rank."""
    peak_bytes: list[int]
    """By rank: most that blocks held at once."""
    held_bytes: list[int]
    """By rank: still held at the end."""
    release: str
    """Of megatron-core."""
