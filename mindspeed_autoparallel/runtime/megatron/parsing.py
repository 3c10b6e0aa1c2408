"""Around the host's ``parse_args``: our flags join the parser, then features see the parsed arguments."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.runtime.flags import add_missing_flags, flags_given
from mindspeed_autoparallel.runtime.megatron.features import TASK_VARIABLE, after_parsing

ParserHook = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def parse_with_our_flags(parse: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the host's ``parse(extra_args_provider, ...)``; untouched when no flag of ours is on the command line."""
    wants_help = bool({"-h", "--help"} & set(sys.argv[1:]))
    if not (flags_given(sys.argv[1:]) or wants_help or os.environ.get(TASK_VARIABLE)):
        return parse(*args, **kwargs)
    if kwargs.get("ignore_unknown_args") or (len(args) > 1 and args[1]):
        # Megatron's side looks (fault tolerance, restarts), without the script's own arguments: not the training's.
        return parse(*args, **kwargs)
    rest = dict(kwargs)
    provider: ParserHook | None = args[0] if args else rest.pop("extra_args_provider", None)

    def provider_with_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        # Ours come last, so that what the host registers under the same name wins.
        return add_missing_flags(provider(parser) if provider is not None else parser)

    arguments = parse(provider_with_ours, *args[1:], **rest)
    try:
        after_parsing(arguments)
    except AutoParallelError as error:
        # A person reads this in a training log: the message, not the stack.
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    return arguments
