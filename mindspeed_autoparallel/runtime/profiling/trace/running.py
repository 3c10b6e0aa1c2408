"""Runs a block forward and backward, or a stage through Megatron's schedule, and counts calls and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from mindspeed_autoparallel.runtime.devices.cpu.storages import tensors_in
from mindspeed_autoparallel.runtime.profiling.operator_calls import largest_bytes
from mindspeed_autoparallel.runtime.profiling.trace.building import Head, build_embedding, build_layer, build_stage
from mindspeed_autoparallel.runtime.profiling.trace.fake_tensors import Tracer
from mindspeed_autoparallel.runtime.profiling.trace.request import BlockResult, Phase, TraceRequest
from mindspeed_autoparallel.runtime.profiling.trace.world import World

SCHEMA_VERSION = 2
_GLOO_LET_GO_S = 0.05


class CallCounter(Tracer):
    """Counts equal calls, and live and peak bytes of storages created since its start."""

    def __init__(self, let_go_s: float = 0.0) -> None:
        super().__init__(let_go_s=let_go_s, count_existing=False)
        self.operators: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
        self.collectives: Counter[tuple[str, int]] = Counter()
        self._peak_bytes = 0

    def take_phase(self) -> Phase:
        """Return the calls since the last phase, live bytes, and the peak of all phases so far."""
        live_bytes = self.current_bytes()
        self._peak_bytes = max(self._peak_bytes, self.take_peak_bytes())
        phase: Phase = {
            "operators": [
                {"name": name, "shapes": [list(shape) for shape in shapes], "count": count}
                for (name, shapes), count in sorted(self.operators.items())
            ],
            "collectives": [
                {"name": name, "size_bytes": size, "count": count}
                for (name, size), count in sorted(self.collectives.items())
            ],
            "peak_bytes": self._peak_bytes,
            "live_bytes": live_bytes,
        }
        self.operators.clear()
        self.collectives.clear()
        return phase

    def _record(self, name: str, tensors: Sequence[torch.Tensor], args: Any, kwargs: Any) -> None:
        if name.startswith(("c10d.", "_c10d_functional.")):
            self.collectives[name, largest_bytes(tensors)] += 1
        elif not name.startswith("prim"):
            self.operators[name, tuple(tuple(tensor.shape) for tensor in tensors)] += 1


class SavedBytes:
    """Bytes of distinct storages that autograd keeps for backward, without parameters and inputs."""

    def __init__(self, ignored: Any) -> None:
        self._ignored = {tensor.untyped_storage()._cdata for tensor in tensors_in(ignored)}
        self._seen: dict[int, Any] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._ignored:
            # A reference to the storage prevents the reuse of its address.
            self._seen.setdefault(storage._cdata, storage)
        return tensor

    def release(self) -> int:
        """Return the total, and drop the references, so that backward frees the storages as usual."""
        total = sum(int(storage.nbytes()) for storage in self._seen.values())
        self._seen.clear()
        return total

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)


def trace(request: TraceRequest, world: World) -> BlockResult:
    """Return parameters, and for every phase its operators, collectives, live and peak bytes, of one rank.

    A block has the phases ``forward`` and ``backward``, and ``saved_bytes`` between them; a stage has ``step``.
    """
    world.enter(request)
    counter = CallCounter(0.0 if world.backend == "fake" else _GLOO_LET_GO_S)
    with world.tensors():
        torch.manual_seed(1)
        traced = _trace_stage(request, counter) if request.block == "stage" else _trace_block(request, counter)
    return {"schema_version": SCHEMA_VERSION, "block": request.block, **traced}


def _trace_block(request: TraceRequest, counter: CallCounter) -> BlockResult:
    module, inputs, run = _block(request)
    parameters = list(module.parameters())
    with counter, SavedBytes([parameters, inputs]) as saved:
        output = run()
    saved_bytes = saved.release()
    forward = counter.take_phase()
    gradient = torch.ones_like(output)
    with counter:
        output.backward(gradient)
    backward = counter.take_phase()
    return {
        "parameter_count": sum(parameter.numel() for parameter in parameters),
        "saved_bytes": saved_bytes,
        "output_bytes": output.numel() * output.element_size(),
        "forward": forward,
        "backward": backward,
    }


def _block(request: TraceRequest) -> tuple[Any, list[torch.Tensor], Any]:
    """Return the module, its inputs, and a call that runs it on them."""
    local = request.sequence // request.context
    if request.block == "embedding":
        embedding = build_embedding(request)
        tokens = torch.zeros((request.micro_batch, local), dtype=torch.int64)
        return embedding, [tokens], lambda: embedding(tokens, tokens)
    rows = local // (request.tensor if request.sequence_parallel else 1)
    hidden = torch.randn(
        (rows, request.micro_batch, request.hidden), dtype=getattr(torch, request.dtype), requires_grad=True
    )
    if request.block == "head":
        head = Head(request)
        labels = torch.zeros((local, request.micro_batch), dtype=torch.int64)
        return head, [hidden, labels], lambda: head(hidden, labels)
    layer = build_layer(request)

    def forward(states: torch.Tensor) -> torch.Tensor:
        result = layer(states, attention_mask=None)
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return output

    if request.recompute != "full":
        return layer, [hidden], lambda: forward(hidden)
    from megatron.core import tensor_parallel

    return layer, [hidden], lambda: tensor_parallel.checkpoint(forward, False, hidden)


def _trace_stage(request: TraceRequest, counter: CallCounter) -> BlockResult:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = build_stage(request)
    with counter:
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[_batches(request) for _ in chunks] if len(chunks) > 1 else _batches(request),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=request.num_microbatches,
            seq_length=request.sequence,
            micro_batch_size=request.micro_batch,
            forward_only=False,
        )
        step = counter.take_phase()
    return {
        "parameter_count": sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters()),
        "step": step,
    }


def _batches(request: TraceRequest) -> Iterator[torch.Tensor]:
    while True:
        yield torch.zeros((request.micro_batch, request.sequence // request.context), dtype=torch.int64)


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, object]]:
        return output.mean(), {}

    return model(tokens, tokens, None, labels=tokens), loss
