"""A flag as data: enough to register it, to document it, and to check it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One command line flag."""

    name: str
    """With dashes: ``--auto-parallel-mm``."""
    help: str
    """One sentence for ``--help`` and docs/flags.md."""
    type: Callable[[str], Any] | None = None
    """Converter; ``None`` makes it a switch."""
    default: Any = None
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    used_by: tuple[str, ...] = ()
    """Switches of features beside its group's that read it."""

    @property
    def destination(self) -> str:
        """The attribute of the parsed arguments."""
        return self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class FlagGroup:
    """The flags of one feature; a feature is switched on by its first flag."""

    title: str
    flags: tuple[Flag, ...]
    used_by: tuple[str, ...] = ()
    """Switches of the features that read these flags; empty: the group's own switch."""

    def readers(self, flag: Flag) -> tuple[str, ...]:
        """Switches of the features that read ``flag``."""
        return (*(self.used_by or (self.switch,)), *flag.used_by)

    @property
    def switch(self) -> str:
        """The flag that turns the feature on."""
        return self.flags[0].name


def positive_int(text: str) -> int:
    """An integer of at least 1, or argparse's error."""
    return _integer(text, 1)


def non_negative_int(text: str) -> int:
    """An integer of at least 0, or argparse's error."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        # Of other exceptions argparse tells the function's name only.
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return value
