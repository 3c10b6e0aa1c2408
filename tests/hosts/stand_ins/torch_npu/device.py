"""``torch.npu``: the answers of ``torch.cuda``, which is the plugin's CPU facade when it is called."""

import importlib.machinery
import sys
import types
from typing import Any

import torch


class NpuModule(types.ModuleType):
    """Hand attributes over to ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cuda, name)


class _DeviceKind(type):
    """Real devices are instances of ``Device``, as code that asks ``isinstance(x, torch.device)`` expects."""

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, _torch_device)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _torch_device)


_torch_device = torch.device


class Device(metaclass=_DeviceKind):
    """``torch.device`` that takes "npu" for "cuda", which is what torch_npu's transfer makes of both.

    torch's own way, renaming its private backend, makes torch look for that backend's library.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args = (args[0].replace("npu", "cuda"), *args[1:])
        return _torch_device(*args, **kwargs)


def provide() -> NpuModule:
    """Make ``torch.npu``, the modules below it and its device names; return the first."""
    from torch_npu.placeholders import PlaceholderModule

    module = NpuModule("torch_npu.npu")
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu.npu", None, is_package=True)
    module.is_available = lambda: True
    module.get_device_name = lambda device=None: "Ascend910B2"
    module.get_soc_version = lambda: 224
    module.set_compile_mode = lambda **settings: None
    module.set_option = lambda settings: None
    module.config = types.SimpleNamespace(allow_internal_format=False)
    module.utils = PlaceholderModule("torch_npu.npu.utils")
    module.utils.get_cann_version = lambda *names: "8.2.RC1"
    module._recovery = PlaceholderModule("torch_npu.npu._recovery")
    for name, value in (("", module), (".utils", module.utils), ("._recovery", module._recovery)):
        sys.modules[f"torch_npu.npu{name}"] = value
    torch.npu, torch.device = module, Device
    torch.histc = _histc
    return module


_torch_histc = torch.histc


def _histc(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Count integers as an accelerator does; on CPU torch counts floating-point numbers alone."""
    if tensor.is_floating_point():
        return _torch_histc(tensor, *args, **kwargs)
    return _torch_histc(tensor.double(), *args, **kwargs).to(tensor.dtype)
