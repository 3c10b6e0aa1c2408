"""mindspeed_llm.fsdp2.utils.arguments: the parser of MindSpeed-LLM's FSDP2 trainer, which drops unknown arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.patching import Patch


def refuse_our_flags(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> Any:
    """End the process if a flag of this package is on the command line; otherwise parse it."""
    from mindspeed_autoparallel.errors import ConfigError, told_in_a_line
    from mindspeed_autoparallel.runtime.flags.registration import flags_of_command

    given = sorted(flags_of_command())
    with told_in_a_line():
        if given:
            raise ConfigError(
                f"{given[0]} works through Megatron, and this is MindSpeed-LLM's FSDP2 trainer, which would train as "
                "if the flag were not there. Leave it out; docs/fsdp2.md lists which trainers are planned."
            )
    return wrapped(*args, **kwargs)


PATCHES = [
    Patch(
        target="mindspeed_llm.fsdp2.utils.arguments:fsdp2_parse_args",
        wrapper=refuse_our_flags,
        distribution="mindspeed-llm",
        parameters=("rootclass",),
        why="MindSpeed-LLM's FSDP2 trainer drops unknown arguments: with a flag of this package it would train "
        "as if the flag were not there.",
    )
]
