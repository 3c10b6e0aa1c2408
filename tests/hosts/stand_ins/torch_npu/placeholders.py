"""Names that hosts import and keep, and whose values are not used in training on CPU."""

import importlib.machinery
import sys
import types
from typing import Any

_MODULES = (
    "torch_npu._C",
    "torch_npu._C._distributed_c10d",
    "torch_npu.contrib",
    "torch_npu.contrib.transfer_to_npu",
    "torch_npu.optim",
    "torch_npu.profiler",
    "torch_npu.profiler.dynamic_profile",
    "torch_npu.profiler.profiler",
    "torch_npu.utils",
    "torch_npu.utils.collect_env",
    "torch_npu.utils.flops_count",
    "torchair",
    "torchair.configs",
    "torchair.configs.compiler_config",
    "torchair.ge",
    "torchair.ge_concrete_graph",
    "torchair.ge_concrete_graph.fx2ge_converter",
    "torchair.ge_concrete_graph.ge_graph",
    # Gone from recent releases of torchvision; MindSpeed-MM imports it, and the tests read no video.
    "torchvision.io.video",
)


class Placeholder:
    """Answer every attribute with a placeholder; called with one function, as a decorator is, return the function."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Placeholder":
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):
            return args[0]
        return Placeholder(f"{self._name}(...)")

    def __enter__(self) -> "Placeholder":
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}>"


class PlaceholderModule(types.ModuleType):
    """A module of placeholders."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")


class FlopsCounter:
    """Count nothing: there is no NPU to ask."""

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End."""

    def get_flops(self) -> list[int]:
        """Return two zeros, as the recorded and the traversed count."""
        return [0, 0]


def provide_modules() -> None:
    """Put every placeholder module into ``sys.modules`` and on its parent."""
    for name in _MODULES:
        module = sys.modules.setdefault(name, PlaceholderModule(name))
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)
    sys.modules["torch_npu.utils.flops_count"].FlopsCounter = FlopsCounter
    sys.modules["torch_npu.utils.collect_env"].get_cann_version = lambda *names: "8.2.RC1"
