"""megatron.training.checkpointing: random states of modules with a layout of their own."""

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch


def _save(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.hetero.checkpoint import save

    return save(wrapped, args, kwargs)


def _load(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.hetero.checkpoint import load

    return load(wrapped, args, kwargs)


PATCHES = [
    Patch(
        target="megatron.training.checkpointing:save_checkpoint",
        wrapper=_save,
        versions=">=0.12,<0.21",
        parameters=("iteration",),
        flags=("--hetero-parallel", "--auto-parallel-hetero"),
        why="The host saves the generators of one module; those of the encoders are written beside them.",
    ),
    Patch(
        target="megatron.training.checkpointing:load_checkpoint",
        wrapper=_load,
        versions=">=0.12,<0.21",
        flags=("--hetero-parallel", "--auto-parallel-hetero"),
        why="Encoders go on drawing where they stopped.",
    ),
]
