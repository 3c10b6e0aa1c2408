"""Just enough of an accelerator for megatron.core on CPU: every device is the CPU, its generator is the CPU's."""

import functools
import types

import torch
from torch.jit import _builtins
from torch.utils._device import _device_constructors

_METHODS = ("to", "new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")


def _on_cpu(function):
    @functools.wraps(function)
    def made(*args, **kwargs):
        device = kwargs.get("device", "")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return made


def _make_everything_on_cpu():
    """Wrap what makes a tensor; a mode, which sees every operation, takes a sixth of a small training."""
    factories = {getattr(function, "__name__", "") for function in _device_constructors()}
    for name in {*factories, *_LIKE, "tensor", "as_tensor", "asarray"}:
        function = getattr(torch, name, None)
        if not callable(function) or isinstance(function, type):
            continue
        made = _on_cpu(function)
        made.__module__, made.__qualname__ = "torch", name
        setattr(torch, name, made)
        operator = _builtins._find_builtin(function)
        if operator is not None:
            _builtins._register_builtin(made, operator)  # for torch.jit.script
    for name in _METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))


def install():
    """Call before megatron is imported; ``settle`` after."""
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    stream = types.SimpleNamespace(wait_stream=lambda *a: None, synchronize=lambda: None)
    cuda.current_stream = cuda.default_stream = lambda *args: stream
    cuda.synchronize = lambda *args: None
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    for name in ("FloatTensor", "IntTensor", "LongTensor", "BFloat16Tensor", "HalfTensor", "DoubleTensor"):
        setattr(cuda, name, getattr(torch, name))
    kinds = {torch.float32: "torch.cuda.FloatTensor", torch.bfloat16: "torch.cuda.BFloat16Tensor"}
    original = torch.Tensor.type
    torch.Tensor.type = lambda self, dtype=None, *a, **k: (
        kinds.get(self.dtype) or original(self) if dtype is None else original(self, dtype, *a, **k)
    )
    _make_everything_on_cpu()


def settle():
    """Megatron's own places that ask a GPU, after it is imported."""
    import megatron.core.fp8_utils as fp8
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.torch_norm as torch_norm

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    def norm(cls, config, hidden_size, eps=1e-5, **kwargs):
        layer = torch.nn.LayerNorm(hidden_size, eps=eps)
        for parameter in layer.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return layer

    torch_norm.WrappedTorchNorm.__new__ = norm
    if hasattr(fp8, "_quantize_param_shard_impl"):
        quantize = fp8._quantize_param_shard_impl
        fp8._quantize_param_shard_impl = lambda params, *a, **k: quantize(params, *a, **k) if params else None


def install_for_training():
    """Like ``install``, and what megatron.training asks of a device beside that; call before megatron is imported."""
    import collections
    import contextlib
    import os

    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the fused functions are compiled, for a GPU
    install()
    cuda, distributed = torch.cuda, torch.distributed
    properties = types.SimpleNamespace(name="CPU", major=8, minor=0, multi_processor_count=1, total_memory=2**34)
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 8, "current_device": 0, "set_device": None,
        "get_device_properties": properties, "get_device_capability": (8, 0), "get_device_name": "CPU",
        "memory_stats": collections.defaultdict(int), "empty_cache": None, "reset_peak_memory_stats": None,
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "mem_get_info": (2**34, 2**34), "is_current_stream_capturing": False, "is_bf16_supported": True,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(cuda, name, lambda *args, value=value, **kwargs: value)
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda.manual_seed_all = cuda.manual_seed
    cuda.default_generators = (torch.default_generator,) * 8
    cuda.stream = cuda.device = lambda *args: contextlib.nullcontext()
    cuda.Stream = cuda.Event = lambda *args, **kwargs: cuda.current_stream()
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, lambda *args: None)
    for name in ("is_available", "current_accelerator"):
        setattr(torch.accelerator, name, lambda *args, **kwargs: None)
    for name in ("init_process_group", "new_group", "barrier"):
        made = getattr(distributed, name)

        def without_device(*args, made=made, **kwargs):
            for word in ("device_id", "device_ids", "pg_options"):
                kwargs.pop(word, None)
            return made(*args, **kwargs)

        setattr(distributed, name, without_device)
