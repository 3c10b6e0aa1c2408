"""Just enough of an accelerator for megatron.core on CPU: every device is the CPU, its generator is the CPU's."""

import types

import torch
from torch.overrides import TorchFunctionMode


class _EverythingOnCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


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
    _EverythingOnCpu().__enter__()


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
