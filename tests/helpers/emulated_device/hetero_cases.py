"""Hetero steps to run: a backbone's pipeline, an encoder under its own layout, and what both cost. Pure data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class HeteroCase:
    """One step of ``runtime.hetero`` on the emulated device; ``world`` ranks, the rest is data parallel."""

    world: int
    tensor_size: int
    pipeline_size: int
    encoder_tensor_size: int
    scale: int
    memory: str
    num_microbatches: int
    micro_batch_size: int
    forward_ns: list[int]
    """Of one microbatch, by stage."""
    backward_ns: list[int]
    link_ns: list[int]
    """Between stages s and s + 1."""
    encoder_forward_ns: list[int]
    """By number of samples computed together, from 0 on."""
    encoder_backward_ns: list[int]
    transfer_ns: int
    """Start of an all-to-all."""
    transfer_ns_per_sample: float
    """Of one sample's rows, on the rank that sends or receives most."""
    sequence_parallel: bool = False
    sleeping: bool = False
    """Compute by sleeping in real time over plain gloo, without links."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
