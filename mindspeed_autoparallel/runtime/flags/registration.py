"""Adds our flags to the host's parser, last, and only those whose names the host lacks.

Hosts register some of them already (MindSpeed-MM, MindSpeed); a clash must never become an argparse error.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from mindspeed_autoparallel.runtime.flags.flag import Flag, FlagGroup, flags_of
from mindspeed_autoparallel.runtime.flags.shared import DataFlags, NodeFlags, ProfileSourceFlags
from mindspeed_autoparallel.runtime.flags.switches import SWITCHES

if TYPE_CHECKING:
    import argparse

_FEATURES = "mindspeed_autoparallel.runtime.features"


def flag_groups() -> Iterator[type[FlagGroup]]:
    """Yield the group of every feature's ``flags.py``, in the order of the features' names, then the shared ones."""
    features = importlib.import_module(_FEATURES)
    for feature in sorted(item.name for item in pkgutil.iter_modules(features.__path__) if item.ispkg):
        module = importlib.import_module(f"{_FEATURES}.{feature}.flags")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, FlagGroup) and value.__module__ == module.__name__:
                yield value
    yield from (NodeFlags, ProfileSourceFlags, DataFlags)


_OFF = ("", "0", "false", "none", "null")


def flags_given(argv: Sequence[str]) -> set[str]:
    """Return the names of our flags on the command line ``argv`` (``--name`` or ``--name=value``)."""
    words = {plain_flag(word) for word in argv if word.startswith("--")}
    return words & {flag.name for group in flag_groups() for flag in flags_of(group)}


def flags_of_command() -> set[str]:
    """Return the names of our flags on this process's command line; an embedded interpreter has none."""
    return flags_given(getattr(sys, "argv", [])[1:])


def keys_given(argv: Sequence[str]) -> dict[str, str]:
    """Return our flags that ``argv`` gives as Hydra's keys (``+auto_parallel_mm=true``): name -> word."""
    names = {flag.destination: flag.name for group in flag_groups() for flag in flags_of(group)}
    found = {}
    for word in argv:
        key, equals, value = word.partition("=")
        name = names.get(key.lstrip("+").rpartition(".")[2].replace("-", "_"))
        if name and equals and not word.startswith("-") and value.lower() not in _OFF:
            found[name] = word
    return found


def without_switches(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` without the switches that start a feature: processes that measure for it must not start it again.

    Hosts also read the command line themselves, some of them before they make a parser.
    """
    hidden = {switch.flag for switch in SWITCHES if switch.is_hidden}
    return [word for word in argv if word.replace("_", "-") not in hidden]


def words_whose_flag(wanted: Callable[[str], bool], words: Sequence[str]) -> list[str]:
    """Return the ``wanted`` flags of a command line with their values; words before the first flag belong to ``""``."""
    found, name = [], ""
    for word in words:
        if word.startswith("--"):
            name = plain_flag(word)
        if wanted(name):
            found.append(word)
    return found


_OF_HOST_UNMEASURED = (
    *("--master", "--save", "--load", "--train-iters", "--log-interval", "--tensorboard-dir", "--wandb"),
    *("--data-cache-path", "--mm-model"),
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size", "--global-batch-size"),
)
"""Prefixes of the host's flags that change neither a trace nor a measurement: paths (files are compared by content),
lengths of a run, and sizes that the searches vary."""


def without_unmeasured(words: Sequence[str], kept: Collection[str]) -> list[str]:
    """Return a command line without flags that change neither a trace nor a measurement.

    Of this package's flags only ``kept`` stay.
    """
    dropped = {flag.name for group in flag_groups() for flag in flags_of(group)} - set(kept)
    return words_whose_flag(lambda name: name not in dropped and not name.startswith(_OF_HOST_UNMEASURED), words)


def plain_flag(word: str) -> str:
    """Return the flag without a value after ``=``, and with dashes: Megatron takes either spelling."""
    return word.split("=", 1)[0].replace("_", "-")


def add_missing_flags(parser: argparse.ArgumentParser) -> tuple[list[Flag], set[str]]:
    """Register every flag of this package that ``parser`` lacks; return these, and the names that it had already, with
    the host's meaning."""
    taken = set(parser._option_string_actions)
    added: list[Flag] = []
    of_host: set[str] = set()
    for group in flag_groups():
        missing = [flag for flag in flags_of(group) if taken.isdisjoint((flag.name, "--" + flag.destination))]
        of_host |= {flag.name for flag in flags_of(group) if flag not in missing}
        section = parser.add_argument_group(title=group.TITLE) if missing else parser
        for flag in missing:
            add_flag(section, flag)
        added += missing
    return added, of_host


def add_flag(section: argparse._ActionsContainer, flag: Flag) -> None:
    """Register ``flag`` in a parser or a section of one."""
    names = dict.fromkeys((flag.name, "--" + flag.destination))
    # A default that the script set on the parser before the flag was added takes effect.
    default = section._defaults.get(flag.destination, flag.default)
    if flag.type is bool:
        section.add_argument(*names, action="store_true", default=bool(default), help=flag.help)
    else:
        section.add_argument(
            *names,
            nargs=None if flag.const is None else "?",
            const=flag.const,
            type=flag.convert,
            default=default,
            choices=flag.choices,
            metavar=flag.metavar,
            help=flag.help,
        )
