"""Builds one megatron-core layer in a layout and runs it forward and backward under the tracker.

Runs in a process of its own (``python -m``): it replaces functions of torch.cuda and Megatron's RNG tracker, which no
training process must see. With ``backend`` ``fake`` every rank but this one is pretended and no tensor has data; with
``gloo`` the same code runs for real, which is how the trace is checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
import torch.distributed

from mindspeed_autoparallel.runtime.tracing.request import LayerRequest, read_layer_request
from mindspeed_autoparallel.runtime.tracing.tracker import SavedBytes, Tracker

SCHEMA_VERSION = 1


class _NoRngStates:
    """Stands in for Megatron's RNG tracker, which wants a CUDA generator."""

    def fork(self, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: Any) -> None:
        return None

    def add(self, *args: Any) -> None:
        return None

    def is_initialized(self) -> bool:
        return True

    def reset(self) -> None:
        return None


class _Norm(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """RMS or layer norm whose weight is marked for sequence parallelism; the local one of Megatron refuses it."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.rms = config.normalization == "RMSNorm"
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = None if self.rms else torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.rms:
            return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)
        return torch.nn.functional.layer_norm(hidden, (hidden.shape[-1],), self.weight, self.bias, self.eps)


def _prepare_torch() -> None:
    device = torch.device("cpu")
    torch.cuda.current_device = lambda: device
    for name in ("synchronize", "set_device", "set_rng_state"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args, **kwargs: None


def _prepare_megatron() -> None:
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    tracker = _NoRngStates()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *args, **kwargs: tracker  # type: ignore[attr-defined]  # replaced


def _initialize(request: LayerRequest, backend: str) -> None:
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", rank=0, world_size=request.num_ranks, store=FakeStore())
    else:
        torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        request.tensor,
        1,
        context_parallel_size=request.context,
        expert_model_parallel_size=request.expert,
        create_gloo_process_groups=False,
    )


def _configuration(request: LayerRequest) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    recompute: dict[str, Any] = {}
    if request.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif request.recompute == "selective":
        recompute = {"recompute_granularity": "selective"}
    experts: dict[str, Any] = {}
    if request.num_experts:
        experts = {
            "num_moe_experts": request.num_experts,
            "moe_router_topk": request.topk,
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
        }
    dtype = getattr(torch, request.dtype)
    return TransformerConfig(
        num_layers=1,
        hidden_size=request.hidden,
        num_attention_heads=request.heads,
        num_query_groups=request.kv_heads or request.heads,
        ffn_hidden_size=request.ffn or 4 * request.hidden,
        tensor_model_parallel_size=request.tensor,
        context_parallel_size=request.context,
        expert_model_parallel_size=request.expert,
        sequence_parallel=request.sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        bf16=request.dtype == "bfloat16",
        fp16=request.dtype == "float16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gated_linear_unit=request.gated,
        activation_func=torch.nn.functional.silu if request.gated else torch.nn.functional.gelu,
        normalization="RMSNorm" if request.gated else "LayerNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **{"add_bias_linear": not request.gated, **experts},
        **recompute,
    )


def _build(request: LayerRequest) -> tuple[Any, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    from mindspeed_autoparallel.runtime.attention.context_parallel import ContextParallelAttention

    config = _configuration(request)
    spec = get_gpt_layer_local_spec(num_experts=request.num_experts or None, moe_grouped_gemm=False)
    spec.submodules.input_layernorm = _Norm
    spec.submodules.pre_mlp_layernorm = _Norm
    # The local attention of Megatron refuses context parallelism and stores the attention matrix.
    spec.submodules.self_attention.submodules.core_attention = ContextParallelAttention
    return config, build_module(spec, config=config, layer_number=1)


def _run(layer: Any, hidden: torch.Tensor, request: LayerRequest) -> torch.Tensor:
    if request.recompute != "full":
        return _output(layer(hidden, attention_mask=None))
    from megatron.core import tensor_parallel

    def forward(states: torch.Tensor) -> torch.Tensor:
        return _output(layer(states, attention_mask=None))

    again: torch.Tensor = tensor_parallel.checkpoint(forward, False, hidden)
    return again


def _output(result: Any) -> torch.Tensor:
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output


@contextlib.contextmanager
def _fake_tensors(backend: str) -> Iterator[None]:
    if backend != "fake":
        yield
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


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


def trace_layer(request: LayerRequest, backend: str) -> dict[str, Any]:
    """Everything about one layer on rank 0: parameters, saved bytes, and both phases' operators, collectives, peaks."""
    _prepare_torch()
    _initialize(request, backend)
    _prepare_megatron()
    with _fake_tensors(backend):
        torch.manual_seed(1)
        _, layer = _build(request)
        rows = request.sequence // request.context // (request.tensor if request.sequence_parallel else 1)
        shape = (rows, request.micro_batch, request.hidden)
        hidden = torch.randn(shape, dtype=getattr(torch, request.dtype), requires_grad=True)
        parameters = list(layer.parameters())
        forward = Tracker(pause_s=0.0 if backend == "fake" else 0.1)
        forward.ignore([parameters, hidden, list(layer.buffers())])
        with forward, SavedBytes([parameters, hidden]) as saved:
            output = _run(layer, hidden, request)
        saved_bytes = saved.release()
        result = {"forward": _phase(forward)}
        gradient = torch.ones_like(output)
        forward.operators.clear()
        forward.collectives.clear()
        forward.ignore(gradient)
        with forward:
            output.backward(gradient)
        result["backward"] = _phase(forward)
    return {
        "schema_version": SCHEMA_VERSION,
        "parameter_count": sum(parameter.numel() for parameter in parameters),
        "saved_bytes": saved_bytes,
        **result,
    }


def main() -> int:
    """Reads a request from standard input; prints the trace as one line of JSON (rank 0 only)."""
    backend = sys.argv[1]
    trace = trace_layer(read_layer_request(json.load(sys.stdin)), backend)
    if torch.distributed.get_rank() == 0:
        print("TRACE " + json.dumps(trace))
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
