"""Combined 1F1B on the emulated device: Megatron's own schedule plans over layers that take time and hold bytes.

Which pass begins when, how layers of both passes take turns and when messages leave is Megatron's code; streams are not
there, so what a pair saves is given (``Case.saving_ns``).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.transformer.module import MegatronModule

from emulated_device.payload import Payload

_FIRST = ("pre_dispatch_computation", "attn")
"""The nodes that a layer's forward begins with, and its backward ends with; by release."""


@contextlib.contextmanager
def without_streams() -> Iterator[None]:
    """Let everything of Megatron's that only moves between streams do nothing."""
    where = "megatron.core.pipeline_parallel.combined_1f1b."
    plans = "megatron.core.models.common.model_chunk_schedule_plan."
    with (
        mock.patch("torch.cuda.stream", lambda stream: contextlib.nullcontext()),
        mock.patch("megatron.core.models.gpt.gpt_model.GPTModel", MegatronModule),  # 0.16 asks what it is given
        mock.patch("torch.cuda.current_stream", lambda: None),
        mock.patch("torch.cuda.nvtx.range_push", lambda text: None),
        mock.patch("torch.cuda.nvtx.range_pop", lambda: None),
        mock.patch(where + "set_streams", lambda **_: None),
        mock.patch(where + "get_comp_stream", lambda: None, create=True),  # not in 0.16
        mock.patch(plans + "get_comm_stream", lambda: None),
    ):
        yield


class ChunkPlan(TransformerModelChunkSchedulePlan):  # type: ignore[misc]  # megatron is untyped
    """One microbatch on one chunk: a layer per block of the stage that is no end of the model, one at least."""

    def __init__(self, stage: Any, microbatch: int, received: torch.Tensor | None) -> None:
        self.stage, self.microbatch, self.received = stage, microbatch, received
        self.vp_stage = stage.chunk
        self._model_chunk_state = types.SimpleNamespace()
        self._event = types.SimpleNamespace(wait=lambda stream: None, record=lambda stream: None)
        blocks = list(stage.blocks)
        first, last = (stage.has_ends and stage.virtual_stage == v for v in (0, stage.num_virtual - 1))
        self.pre_process = _End(blocks.pop(0) if first else (0, 0, 0), stage.rank.memory)
        self.post_process = _End(blocks.pop() if last else (0, 0, 0), stage.rank.memory)
        blocks = blocks or [(0, 0, 0)]
        self.count = len(blocks)
        self._transformer_layers = [_Layer(self, place, block) for place, block in enumerate(blocks)]

    def record_current_stream(self) -> None:
        """Do nothing: there are no streams."""

    def wait_current_stream(self) -> None:
        """Do nothing: there are no streams."""

    def compute(self, kind: str) -> None:
        """Take the time of a pass; a backward beside a forward takes what the pair saves less."""
        stage, rank = self.stage, self.stage.rank
        if kind == "F":
            if self.received is not None:
                Payload(False, stage.virtual_stage - 1, self.microbatch).check(self.received)
            rank.beside = stage.virtual_stage
            duration = stage.forward_ns[self.microbatch]
        else:
            duration = stage.backward_ns[self.microbatch]
            if rank.beside is not None:
                duration -= stage.saving_ns[rank.beside][stage.virtual_stage]
        rank.compute(kind, stage.chunk, self.microbatch, duration)


class _End:
    """Embedding or output layer; on the stages between one that holds nothing."""

    def __init__(self, block: Any, memory: Any) -> None:
        self.block, self.memory = block, memory

    def forward(self, value: Any = None) -> Any:
        self.memory.add(self.block[0])
        self.memory.passing(self.block[1])
        return value

    def backward(self, gradient: Any) -> Any:
        self.memory.passing(self.block[2])
        self.memory.add(-self.block[0])
        return gradient


class _Node:
    """A part of a layer, whose passes the layer decides about."""

    def __init__(self, layer: _Layer, name: str) -> None:
        self.layer, self.name = layer, name

    def forward(self, value: Any) -> Any:
        return self.layer.forward(self.name, value)

    def backward(self, gradient: Any) -> Any:
        return self.layer.backward(self.name, gradient)

    def backward_dw(self) -> None:
        pass


class _Layer:
    """``block``: saved bytes, and what its forward and its backward hold beside them from beginning to end."""

    config = types.SimpleNamespace(ep_overlap_early_attn_memory_release=False)

    def __init__(self, plan: ChunkPlan, place: int, block: Any) -> None:
        self.plan, self.place, self.block, self.memory = plan, place, block, plan.stage.rank.memory
        for name in (*_FIRST, "post_attn", "moe_dispatch", "mlp", "moe_combine", "mtp_post_process"):
            setattr(self, name, _Node(self, name))
        self.begun: set[str] = set()

    def get_low_precision_context(self) -> Any:
        return contextlib.nullcontext()

    get_fp8_context = get_low_precision_context

    def release_state(self) -> None:
        """Do nothing: what is held is counted by the nodes."""

    def forward(self, name: str, value: Any) -> Any:
        saved, transient, _ = self.block
        stage = self.plan.stage
        if name in _FIRST:
            if self.place == 0:
                self.plan.compute("F")
            self.memory.add(saved + transient)
        if name == "moe_combine":
            self.memory.add(-transient)
            if self.place == self.plan.count - 1:
                stage.rank.beside = None
                value = torch.empty(stage.shape, requires_grad=True)
                return Payload(False, stage.virtual_stage, self.plan.microbatch).fill(value.detach()).requires_grad_()
        return value

    def backward(self, name: str, gradient: Any) -> Any:
        plan, stage = self.plan, self.plan.stage
        saved, _, transient = self.block
        if name == "moe_combine":
            self.memory.add(transient)
            if self.place == plan.count - 1 and stage.virtual_stage < stage.num_virtual - 1:
                Payload(True, stage.virtual_stage + 1, plan.microbatch).check(gradient)
        if name == "mlp" and self.place == plan.count - 1:
            plan.compute("B")
        if name in _FIRST:
            self.memory.add(-saved - transient)
            if self.place == 0:
                gradient = Payload(True, stage.virtual_stage, plan.microbatch).fill(torch.empty(stage.shape))
                if plan.received is not None:
                    plan.received.grad = gradient
        return gradient
