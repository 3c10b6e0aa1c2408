"""A model chunk whose forward and backward take given times, hold given bytes, and pass tagged tensors on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule

from emulated_device.clock import VirtualClock
from emulated_device.payload import Payload


class Memory:
    """Bytes in use on one rank, and the most there ever were."""

    def __init__(self) -> None:
        self.used = self.peak = 0

    def add(self, num_bytes: int) -> None:
        self.used += num_bytes
        self.peak = max(self.peak, self.used)

    def passing(self, num_bytes: int) -> None:
        """In use for a moment only."""
        self.peak = max(self.peak, self.used + num_bytes)


class Rank:
    """What the chunks of one rank share."""

    def __init__(self, sleeping: bool) -> None:
        self.clock, self.memory, self.sleeping = VirtualClock(), Memory(), sleeping
        self.order: list[tuple[str, int, int]] = []
        self.beside: int | None = None
        """The virtual stage of a forward that a backward may run beside."""

    def compute(self, kind: str, chunk: int, microbatch: int, duration_ns: int) -> None:
        self.order.append((kind, chunk, microbatch))
        self.clock.advance(duration_ns)
        if self.sleeping:
            time.sleep(duration_ns / 1e9)


class EmulatedStage(MegatronModule):  # type: ignore[misc]  # megatron is untyped
    """Chunk ``chunk`` of the calling rank.

    ``forward_ns``, ``backward_ns``: by microbatch. ``blocks``: see ``Case``. ``shape``: of the tensors between stages.
    """

    def __init__(
        self,
        config: Any,
        rank: Rank,
        *,
        chunk: int,
        virtual_stage: int,
        num_virtual: int,
        forward_ns: Sequence[int],
        backward_ns: Sequence[int],
        blocks: Sequence[Sequence[int]],
        shape: tuple[int, ...],
        saving_ns: Sequence[Sequence[int]] = (),
        has_ends: bool = False,
    ) -> None:
        super().__init__(config)
        self.rank, self.chunk, self.virtual_stage, self.num_virtual = rank, chunk, virtual_stage, num_virtual
        self.forward_ns, self.backward_ns, self.blocks, self.shape = forward_ns, backward_ns, blocks, shape
        self.saving_ns, self.has_ends = saving_ns, has_ends
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = chunk
        self.input: torch.Tensor | None = None
        self.next_microbatch = 0

    def set_input_tensor(self, tensor: Any) -> None:
        self.input = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self) -> torch.Tensor:
        microbatch, self.next_microbatch = self.next_microbatch, self.next_microbatch + 1
        received = self.input
        if received is None:
            received = torch.zeros(self.shape, requires_grad=True)
        else:
            Payload(False, self.virtual_stage - 1, microbatch).check(received)
        return _Compute.apply(received, self, microbatch)

    def build_schedule_plan(self) -> Any:
        """Return the next microbatch's forward and backward as Megatron's combined 1F1B takes them."""
        from emulated_device.paired import ChunkPlan

        microbatch, self.next_microbatch = self.next_microbatch, self.next_microbatch + 1
        return ChunkPlan(self, microbatch, self.input)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, stage: EmulatedStage, microbatch: int) -> torch.Tensor:
        ctx.stage, ctx.microbatch = stage, microbatch
        stage.rank.compute("F", stage.chunk, microbatch, stage.forward_ns[microbatch])
        memory = stage.rank.memory
        for saved, transient, _ in stage.blocks:
            memory.add(saved)
            memory.passing(transient)
        return Payload(False, stage.virtual_stage, microbatch).fill(torch.empty(stage.shape))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        stage, microbatch = ctx.stage, ctx.microbatch
        if stage.virtual_stage < stage.num_virtual - 1:
            Payload(True, stage.virtual_stage + 1, microbatch).check(gradient)
        memory = stage.rank.memory
        for saved, _, transient in reversed(stage.blocks):
            memory.passing(transient)
            memory.add(-saved)
        stage.rank.compute("B", stage.chunk, microbatch, stage.backward_ns[microbatch])
        return Payload(True, stage.virtual_stage, microbatch).fill(torch.empty(stage.shape)), None, None
