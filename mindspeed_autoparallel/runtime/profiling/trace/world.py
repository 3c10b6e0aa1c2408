"""The process of a trace: the CPU stands in for the device, process groups are fake or gloo's.

It replaces functions of torch and Megatron, which must not happen in a training process, so ``python -m`` starts it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.distributed

from mindspeed_autoparallel.runtime.devices.cpu.adapter import CpuAdapter
from mindspeed_autoparallel.runtime.profiling.balanced_routing import balance_routing
from mindspeed_autoparallel.runtime.profiling.trace.fake_tensors import keep_dispatch_real
from mindspeed_autoparallel.runtime.profiling.trace.request import TraceRequest


class World:
    """Process groups of one layout after the other."""

    def __init__(self, backend: str) -> None:
        """Prepare this process for ``backend``: ``fake``, without other ranks, or ``gloo``, as one of torchrun's
        ranks."""
        self.backend = backend
        self._layout: tuple[int, ...] | None = None
        CpuAdapter().prepare()
        balance_routing()
        keep_dispatch_real()

    def enter(self, request: TraceRequest) -> None:
        """Create Megatron's groups for ``request``, or keep those of the previous request if the layout is the same."""
        # A real rank keeps its rank, whichever stage the request names.
        rank = request.rank if self.backend == "fake" else -1
        layout = (
            request.num_ranks,
            rank,
            request.tensor,
            request.pipeline,
            request.virtual,
            request.context,
            request.expert,
            request.tensor_of_experts,
        )
        from megatron.core import parallel_state, tensor_parallel

        if layout == self._layout:
            # The previous block's buffers would count as live, or the new block would reuse them uncounted.
            parallel_state.destroy_global_memory_buffer()
            parallel_state._set_global_memory_buffer()
            return
        if self._layout is not None:
            parallel_state.destroy_model_parallel()
        if self._layout is None or self._layout[:2] != layout[:2]:
            self._start(request)
        parallel_state.initialize_model_parallel(
            request.tensor,
            request.pipeline,
            virtual_pipeline_model_parallel_size=request.virtual if request.virtual > 1 else None,
            context_parallel_size=request.context,
            expert_model_parallel_size=request.expert,
            expert_tensor_parallel_size=request.tensor_of_experts if request.num_experts else None,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        self._layout = layout

    def _start(self, request: TraceRequest) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if self.backend == "gloo":
            torch.distributed.init_process_group("gloo")
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", rank=request.rank, world_size=request.num_ranks, store=FakeStore())

    @contextlib.contextmanager
    def tensors(self) -> Iterator[Any]:
        """Make new tensors fake within the context if process groups are fake."""
        if self.backend == "gloo":
            yield
            return
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
