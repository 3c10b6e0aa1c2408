"""megatron.training.global_vars: no feature is switched on unnoticed after the arguments were parsed."""

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch


def _set_globals(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> Any:
    from mindspeed_autoparallel.runtime.megatron.parsing import refuse_unseen_flags

    refuse_unseen_flags(args[0] if args else kwargs.get("args"))
    return wrapped(*args, **kwargs)


PATCHES = [
    Patch(
        target="megatron.training.global_vars:set_global_variables",
        wrapper=_set_globals,
        parameters=("args",),
        why="A flag of ours that the script or a YAML file made true after parsing is refused: no feature has begun.",
    )
]
