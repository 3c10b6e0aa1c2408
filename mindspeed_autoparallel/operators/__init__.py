"""Operator-level strategy search: graph, rules, search modes; free of torch, loads numpy when a search starts."""

from typing import Any

__all__ = ["derive_megatron", "global_batch_size", "preset_graph", "search_graph", "search_strategies"]

_HOMES = {
    "derive_megatron": "lowering.megatron",
    "global_batch_size": "config",
    "preset_graph": "presets",
    "search_graph": "strategies",
    "search_strategies": "modules",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
