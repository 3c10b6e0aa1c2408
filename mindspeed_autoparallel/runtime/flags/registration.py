"""Adds our flags to the host's parser, last and only where the host has none of that name.

Hosts register some of them already (MindSpeed-MM, MindSpeed); a clash must never become an argparse error.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from mindspeed_autoparallel.runtime import flags as arguments
from mindspeed_autoparallel.runtime.flags.flag import Flag, FlagGroup

if TYPE_CHECKING:
    import argparse

_NOT_GROUPS = ("flag", "registration", "foreign")


def flag_groups() -> Iterator[FlagGroup]:
    """The groups of every feature's file, in the order of the files' names."""
    for module in sorted(item.name for item in pkgutil.iter_modules(arguments.__path__)):
        if module in _NOT_GROUPS:
            continue
        loaded = importlib.import_module(f"{arguments.__name__}.{module}")
        for value in vars(loaded).values():
            if isinstance(value, FlagGroup):
                yield value


def flags_given(argv: Sequence[str]) -> set[str]:
    """The names of our flags that stand on the command line ``argv`` (``--name`` or ``--name=value``)."""
    words = {word.split("=", 1)[0] for word in argv if word.startswith("--")}
    words |= {word.replace("_", "-") for word in words}
    return words & {flag.name for group in flag_groups() for flag in group.flags}


def missing_flags(parser: argparse.ArgumentParser) -> list[tuple[FlagGroup, Flag]]:
    """Flags of ours that ``parser`` has not got, with their groups."""
    taken = set(parser._option_string_actions)
    return [(group, flag) for group in flag_groups() for flag in group.flags if not _is_taken(flag, taken)]


def add_missing_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Register every flag of ours that ``parser`` has not got; returns ``parser``."""
    taken = set(parser._option_string_actions)
    for group in flag_groups():
        missing = [flag for flag in group.flags if not _is_taken(flag, taken)]
        if not missing:
            continue
        section = parser.add_argument_group(title=group.title)
        for flag in missing:
            _add(section, flag)
    return parser


def _is_taken(flag: Flag, taken: Collection[str]) -> bool:
    return flag.name in taken or "--" + flag.destination in taken


def _add(section: argparse._ArgumentGroup, flag: Flag) -> None:
    underscored = "--" + flag.destination
    names = [flag.name] if underscored == flag.name else [flag.name, underscored]
    # A default that the script gave the parser before the flag was there counts.
    default = section._defaults.get(flag.destination, flag.default)
    if flag.type is None:
        section.add_argument(*names, action="store_true", default=bool(default), help=flag.help)
    else:
        section.add_argument(
            *names, type=flag.type, default=default, choices=flag.choices, metavar=flag.metavar, help=flag.help
        )
