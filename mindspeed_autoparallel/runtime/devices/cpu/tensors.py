"""Tensors requested on "cuda" are made on the CPU: hundreds of sites in Megatron pass ``device=current_device()``.

Likewise on "npu": MindSpeed and the hosts built on it pass that name, partly while they are imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspeed_autoparallel.runtime.devices.cpu.edits import Edits

_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_ACCELERATORS = ("cuda", "npu")
_NEW = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")


def names_accelerator(device: Any) -> bool:
    """Return whether ``device`` is the current accelerator: "cuda...", "npu...", a ``torch.device`` of
    either, or a bare index."""
    import torch

    if isinstance(device, torch.device):
        return device.type in _ACCELERATORS
    if isinstance(device, str):
        return device.startswith(_ACCELERATORS)
    return isinstance(device, int) and not isinstance(device, bool)


def install(edits: Edits) -> None:
    """Redirect factories, tensor methods, module methods and torch.load."""
    import torch
    from torch.utils._device import _device_constructors

    names = {getattr(function, "__name__", "") for function in _device_constructors()}
    for name in sorted({*names, *_LIKE, "tensor", "as_tensor", "asarray"}):
        function = getattr(torch, name, None)
        if callable(function) and not isinstance(function, type):
            wrapper = _on_cpu(function)
            # Pickle finds the wrapper by this name, and pickles of the original contain it.
            wrapper.__module__, wrapper.__qualname__ = "torch", name
            edits.set(torch, name, wrapper)
            _let_scripts_know(edits, function, wrapper)
    for name in _NEW:
        edits.set(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    _tensor_methods(edits)
    for name, first in (("to", torch.nn.Module.to), ("cuda", None), ("npu", None)):
        edits.set(torch.nn.Module, name, _module_to(first) if first else lambda self, device=None: self)
    load = torch.load

    @functools.wraps(load)
    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Without map_location, torch.load restores a checkpoint's tensors to the GPU that saved them.
        if map_location is None or names_accelerator(map_location):
            map_location = "cpu"
        return load(f, map_location, *args, **kwargs)

    edits.set(torch, "load", load_on_cpu)


def _let_scripts_know(edits: Edits, function: Any, wrapper: Any) -> None:
    """Make torch.jit.script compile calls of ``wrapper`` like calls of ``function``."""
    from torch.jit import _builtins

    operator = _builtins._find_builtin(function)
    if operator is not None:
        _builtins._register_builtin(wrapper, operator)
        edits.on_undo(lambda: _builtins._get_builtin_table().pop(id(wrapper), None))


def _on_cpu(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def made_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and names_accelerator(kwargs["device"]):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # pinning needs an accelerator
        return function(*args, **kwargs)

    return made_on_cpu


def _module_to(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def to_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if index == 0 and names_accelerator(item) else item for index, item in enumerate(args))
        if names_accelerator(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *args, **kwargs) if args or kwargs else self

    return to_cpu


def _tensor_methods(edits: Edits) -> None:
    import torch

    tensor = torch.Tensor
    cuda_names = {
        torch.float32: "torch.cuda.FloatTensor",
        torch.float16: "torch.cuda.HalfTensor",
        torch.bfloat16: "torch.cuda.BFloat16Tensor",
    }
    type_of = tensor.type

    @functools.wraps(type_of)
    def type_name(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizer and gradient clipping compare these names with the CUDA ones.
        if dtype is None:
            return cuda_names.get(self.dtype) or type_of(self)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return type_of(self, dtype, *args, **kwargs)

    edits.set(tensor, "to", _module_to(tensor.to))
    edits.set(tensor, "type", type_name)
    for name in _ACCELERATORS:
        edits.set(tensor, name, lambda self, *args, **kwargs: self)
    edits.set(tensor, "pin_memory", lambda self, *args, **kwargs: self)
    edits.set(tensor, "is_pinned", lambda self, *args, **kwargs: False)
    edits.set(tensor, "record_stream", lambda self, stream: None)
    edits.set(tensor, "get_device", lambda self: 0)
