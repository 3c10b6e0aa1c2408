"""Wraps the host's ``parse_args``: adds this package's flags, then passes the parsed arguments to the features."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from mindspeed_autoparallel.errors import ConfigError, told_in_a_line
from mindspeed_autoparallel.patching import ENGINE
from mindspeed_autoparallel.runtime.flags.flag import Flag, flags_of
from mindspeed_autoparallel.runtime.flags.registration import (
    add_missing_flags,
    flag_groups,
    flags_given,
    flags_of_command,
    keys_given,
)
from mindspeed_autoparallel.runtime.flags.switches import SWITCHES
from mindspeed_autoparallel.runtime.megatron.features import TASK_VARIABLE, after_parsing, flags_that_are_true

ParserHook = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def parse_with_our_flags(parse: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
    """Call the host's ``parse(extra_args_provider, ...)``; its parser is unchanged if no flag of this package is used.

    The parsed arguments decide: a flag may come from the current command line, from a default of the parser, or from a
    host that registers it itself.
    """
    if kwargs.get("ignore_unknown_args") or (len(args) > 1 and args[1]):
        # Megatron's extra parses (fault tolerance, restarts) lack the script's own arguments: not the training's parse.
        return parse(*args, **kwargs)
    with told_in_a_line():
        _refuse_lost_flags()
        _refuse_keys(keys_given(sys.argv[1:]))
    rest = dict(kwargs)
    provider = args[0] if args else cast("ParserHook | None", rest.pop("extra_args_provider", None))
    added: list[Flag] = []
    of_host: set[str] = set()

    def provider_with_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = provider(parser) if provider is not None else parser
        if _is_meant(parser):
            # Ours are added last, so that a host's flag of the same name wins.
            missing, present = add_missing_flags(parser)
            added.extend(missing)
            of_host.update(present)
        return parser

    arguments = parse(provider_with_ours, *args[1:], **rest)
    with told_in_a_line():
        _refuse_yaml(arguments)
        on = flags_that_are_true(arguments)
        _refuse_keys({name: word for name, word in keys_given(sys.orig_argv).items() if not on})
        if os.environ.get(TASK_VARIABLE):
            after_parsing(arguments, of_host)
        elif added or on:
            _fill(arguments)
            _refuse_unread_flags(arguments, added)
            after_parsing(arguments, of_host)
    return arguments


def refuse_unseen_flags(arguments: object) -> None:
    """End the process if a feature is on in the training's ``arguments`` that was off when they were parsed.

    Scripts can set it on the parsed arguments, in Megatron's ``args_defaults`` or in a YAML file; the feature has then
    not checked the arguments, and the training would ignore the flag.
    """
    if os.environ.get(TASK_VARIABLE):
        return
    unseen = [flag for flag in flags_that_are_true(arguments) if flag not in ENGINE.enabled]
    with told_in_a_line():
        if unseen:
            raise ConfigError(
                f"{unseen[0]} became true after the arguments were parsed, when it can no longer take effect. Give it "
                "on the command line, or as a default of the parser in the script's extra_args_provider."
            )


def _refuse_lost_flags() -> None:
    """Raise ``ConfigError`` for flags of this package that the process was started with but ``sys.argv`` no longer has.

    MindSpeed-MM's YAML launchers rewrite ``sys.argv`` from their file: the training would begin without the feature.
    """
    if os.environ.get(TASK_VARIABLE):
        return
    lost = sorted(flags_given(sys.orig_argv) - flags_of_command())
    if lost:
        raise ConfigError(
            f"{lost[0]} was on the command line, and the script replaced the command line before Megatron parsed it. "
            f"Put {lost[0].lstrip('-')} where the script reads its arguments from (its YAML file), or drop the flag."
        )


def _refuse_keys(given: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` for flags of this package ``given`` as Hydra's keys, which no Megatron parser reads."""
    if given and not os.environ.get(TASK_VARIABLE):
        name, word = next(iter(given.items()))
        raise ConfigError(f"{word} has no effect here: Megatron's parser reads no such key. Write {name}.")


def _refuse_yaml(arguments: object) -> None:
    """Raise ``ConfigError`` if a flag of this package is used with Megatron's ``--yaml-cfg``, in the file or outside.

    The file replaces the whole command line, and has the model's sizes in separate sections.
    """
    file = getattr(arguments, "yaml_cfg", None)
    if file is None:
        return
    meant = [*flags_that_are_true(arguments), *sorted(flags_of_command())]
    if meant:
        raise ConfigError(
            f"{meant[0]} cannot be combined with --yaml-cfg {file}: Megatron reads all arguments from that file, none "
            "from the command line. Give the arguments on the command line."
        )


def _is_meant(parser: argparse.ArgumentParser) -> bool:
    """Return whether a flag of this package is on the command line or on by default, or help is requested."""
    words = sys.argv[1:]
    if flags_given(words) or {"-h", "--help"} & set(words) or os.environ.get(TASK_VARIABLE):
        return True
    return any(parser.get_default(switch.destination) for switch in SWITCHES)


def _fill(arguments: argparse.Namespace) -> None:
    """Set the default of every flag of this package that the parser lacked: a feature may be on without them."""
    for group in flag_groups():
        for flag in flags_of(group):
            if not hasattr(arguments, flag.destination):
                setattr(arguments, flag.destination, flag.default)


def _refuse_unread_flags(arguments: argparse.Namespace, added: list[Flag]) -> None:
    """Raise ``ConfigError`` for a flag on the command line whose feature is off: it would have no effect."""
    given, on = flags_of_command(), set(flags_that_are_true(arguments))
    switches = {switch.flag for switch in SWITCHES}
    for flag in added:
        if flag.name in given and flag.name not in switches and on.isdisjoint(flag.readers):
            raise ConfigError(
                f"{flag.name} is for {' or '.join(flag.readers)}, which is not given: add that, or drop it."
            )
