"""megatron.core.optimizer.optimizer: optimizer state of experts between EP 1 and EP above 1."""

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch


def _load(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.megatron.expert_optimizer import load_state

    return load_state(wrapped, instance, *args, **kwargs)


PATCHES = [
    Patch(
        target="megatron.core.optimizer.optimizer:ChainedOptimizer.load_state_dict",
        wrapper=_load,
        versions=">=0.12,<0.21",
        parameters=("state_dict",),
        flags=("--auto-parallel-plan",),
        why="EP above 1 gives experts an optimizer of their own: a plan with another EP joins or divides the state.",
    ),
]
