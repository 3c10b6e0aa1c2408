"""megatron.training.initialize: random states of modules with a layout of their own."""

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch


def _seed(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.hetero.job import seed

    return seed(wrapped, args, kwargs)


PATCHES = [
    Patch(
        target="megatron.training.initialize:_set_random_seed",
        wrapper=_seed,
        versions=">=0.12,<0.21",
        flags=("--hetero-parallel", "--auto-parallel-hetero"),
        why="Each module draws from a tracker seeded by its own tensor rank.",
    )
]
