"""megatron.core.optimizer: one optimizer over modules with different layouts."""

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch


def _optimizer(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.hetero.building import build_optimizer

    return build_optimizer(wrapped, args, kwargs)


PATCHES = [
    Patch(
        target="megatron.core.optimizer:get_megatron_optimizer",
        wrapper=_optimizer,
        versions=">=0.12,<0.21",
        parameters=("config", "model_chunks"),
        flags=("--hetero-parallel", "--auto-parallel-hetero"),
        why="Each module's parameters are stepped under its own groups; norm, clipping and loss scale are shared.",
    )
]
