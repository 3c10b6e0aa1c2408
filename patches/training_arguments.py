"""megatron.training.arguments: our flags join the host's parser."""

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch


def _parse_args(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    from mindspeed_autoparallel.runtime.megatron.parsing import parse_with_our_flags

    return parse_with_our_flags(wrapped, args, kwargs)


PATCHES = [
    Patch(
        target="megatron.training.arguments:parse_args",
        wrapper=_parse_args,
        parameters=("extra_args_provider",),
        why="Adds the flags the host has not got, and hands the parsed arguments to the features they switch on.",
    )
]
