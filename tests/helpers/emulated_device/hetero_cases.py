"""Hetero steps to run: a backbone's pipeline, an encoder under its own layout, and what both cost. Pure data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SHAPE = (2, 1, 4)
"""Of the tensors between the backbone's stages."""
INPUT_WIDTH = 2
"""Of a row of the encoder's inputs, by which the network tells them from outputs."""
ROWS = 8
"""Of one sample: its sequence, so that sequence shards are equally long."""


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
    """Of one microbatch, by virtual stage."""
    backward_ns: list[int]
    link_ns: list[int]
    """Between virtual stages s and s + 1."""
    encoder_forward_ns: list[list[int]]
    """By stage of the encoder's own pipeline, then by number of samples computed together, from 0 on."""
    encoder_backward_ns: list[list[int]]
    transfer_ns: int
    """Start of an all-to-all."""
    transfer_ns_per_sample: float
    """Of one sample's rows, on the rank that sends or receives most."""
    input_ns_per_sample: float = 0.0
    """Of one sample's inputs, likewise."""
    encoder_latency_ns: int = 0
    """Of a message between stages of the encoder's pipeline."""
    encoder_ns_per_sample: float = 0.0
    """Of one sample's rows there."""
    generator_tensor_size: int = 1
    generator_forward_ns: list[list[int]] = field(default_factory=list)
    """As the encoder's; empty: the model has no generator."""
    generator_backward_ns: list[list[int]] = field(default_factory=list)
    sequential: bool = False
    """Every all-to-all is waited for where it is started: nothing is hidden."""
    sequence_parallel: bool = False
    sleeping: bool = False
    """Compute by sleeping in real time over plain gloo, without links."""

    @property
    def virtual_size(self) -> int:
        return len(self.forward_ns) // self.pipeline_size

    @property
    def encoder_pipeline_size(self) -> int:
        return len(self.encoder_forward_ns)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
