"""Runs a block forward and backward, or a stage through Megatron's schedule, under the tracker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_autoparallel.runtime.profiling.trace.building import Head, build_embedding, build_layer, build_stage
from mindspeed_autoparallel.runtime.profiling.trace.request import TraceRequest
from mindspeed_autoparallel.runtime.profiling.trace.tracker import SavedBytes, Tracker
from mindspeed_autoparallel.runtime.profiling.trace.world import World

SCHEMA_VERSION = 2
_GLOO_PAUSE_S = 0.05


def trace(request: TraceRequest, world: World) -> dict[str, Any]:
    """Return parameters, and for every phase its operators, collectives, live and peak bytes, of one rank.

    A block has the phases ``forward`` and ``backward``, and ``saved_bytes`` between them; a stage has ``step``.
    """
    world.enter(request)
    pause_s = 0.0 if world.backend == "fake" else _GLOO_PAUSE_S
    with world.tensors():
        torch.manual_seed(1)
        traced = _trace_stage(request, pause_s) if request.block == "stage" else _trace_block(request, pause_s)
    return {"schema_version": SCHEMA_VERSION, "block": request.block, **traced}


def _trace_block(request: TraceRequest, pause_s: float) -> dict[str, Any]:
    module, inputs, run = _block(request)
    parameters = list(module.parameters())
    tracker = Tracker(pause_s=pause_s)
    tracker.ignore([parameters, inputs, list(module.buffers())])
    with tracker, SavedBytes([parameters, inputs]) as saved:
        output = run()
    saved_bytes = saved.release()
    forward = _phase(tracker)
    gradient = torch.ones_like(output)
    tracker.operators.clear()
    tracker.collectives.clear()
    tracker.ignore(gradient)
    with tracker:
        output.backward(gradient)
    return {
        "parameter_count": sum(parameter.numel() for parameter in parameters),
        "saved_bytes": saved_bytes,
        "output_bytes": output.numel() * output.element_size(),
        "forward": forward,
        "backward": _phase(tracker),
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


def _trace_stage(request: TraceRequest, pause_s: float) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = build_stage(request)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers()]
    tracker = Tracker(pause_s=pause_s)
    tracker.ignore([parameters, buffers])
    with tracker:
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[_batches(request) for _ in chunks] if len(chunks) > 1 else _batches(request),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=request.num_microbatches,
            seq_length=request.sequence,
            micro_batch_size=request.micro_batch,
            forward_only=False,
        )
    return {"parameter_count": sum(parameter.numel() for parameter in parameters), "step": _phase(tracker)}


def _batches(request: TraceRequest) -> Iterator[torch.Tensor]:
    while True:
        yield torch.zeros((request.micro_batch, request.sequence // request.context), dtype=torch.int64)


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return output.mean(), {}

    return model(tokens, tokens, None, labels=tokens), loss


def _phase(tracker: Tracker) -> dict[str, Any]:
    tracker.pause()
    return {
        "operators": [
            {"name": name, "shapes": [list(shape) for shape in shapes], "count": count}
            for (name, shapes), count in sorted(tracker.operators.items())
        ],
        "collectives": [
            {"name": name, "size_bytes": size, "count": count}
            for (name, size), count in sorted(tracker.collectives.items())
        ],
        "peak_bytes": tracker.peak_bytes,
        "live_bytes": tracker.live_bytes,
    }
