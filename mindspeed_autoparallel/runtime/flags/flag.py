"""Flags as fields of a dataclass per group: the source for their registration, documentation and checked values."""

from __future__ import annotations

import argparse
import types
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from mindspeed_autoparallel.errors import ConfigError, flag_of
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.whole_numbers import MOST, WholeNumber


class FlagGroup:
    """Base of the dataclasses whose fields are the flags of a feature; the first one switches it on."""

    TITLE: ClassVar[str]
    """Heading of the flags in ``--help`` and docs/flags.md."""
    USED_BY: ClassVar[tuple[str, ...]] = ()
    """Switches of the features that read these flags; empty: the group's own."""


_BLANK = "has an empty value, as of a variable that is not set: give one, or leave the flag out"

Group = TypeVar("Group", bound=FlagGroup)


def flag(
    default: Any,
    text: str,
    *,
    metavar: str | None = None,
    least: int | None = None,
    most: int = MOST,
    used_by: tuple[str, ...] = (),
    const: str | None = None,
) -> Any:
    """Declare a field as a flag: ``text`` is its help; ``least`` and ``most``: bounds of a whole number;
    ``used_by``: switches of further features that read it; ``const``: its value if given without one.

    The field's type gives the rest: ``bool`` is a switch, ``Literal`` has choices, ``| None`` may be left out.
    """
    return field(
        default=default,
        metadata={
            "help": text,
            "metavar": metavar,
            "bounds": WholeNumber(least=least, most=most),
            "used_by": used_by,
            "const": const,
        },
    )


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One command line flag, for argparse, docs/flags.md and the reading of arguments."""

    name: str
    """With dashes: ``--auto-parallel-mm``."""
    destination: str
    """The attribute of the parsed arguments, which has the field's name."""
    help: str
    """One sentence for ``--help`` and docs/flags.md."""
    type: type
    """``bool`` for a switch, else ``int``, ``float`` or ``str``."""
    default: Any
    choices: tuple[str, ...] | None
    metavar: str | None
    bounds: WholeNumber | None
    """Bounds of an ``int``."""
    const: str | None
    """Value of the flag given without one; ``None``: it needs a value."""
    readers: tuple[str, ...]
    """Switches of the features that read it."""

    @property
    def convert(self) -> Callable[[str], Any]:
        """Return the function with which argparse converts its text."""
        return self.bounds or (_words if self.type is str else self.type)


def _words(text: str) -> str:
    """Return ``text``; a blank one would switch its feature off, or count as the default."""
    if not text.strip():
        raise argparse.ArgumentTypeError(_BLANK)
    return text


def flags_of(group: type[FlagGroup]) -> tuple[Flag, ...]:
    """Return the flags that the fields of ``group`` declare, in their order."""
    items = fields(group)  # type: ignore[arg-type]  # every group is a dataclass
    readers = group.USED_BY or (flag_of(items[0].name),)
    found = []
    for item in items:
        kind: Any = item.type
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(option for option in get_args(kind) if option is not types.NoneType)
        choices = get_args(kind) if get_origin(kind) is Literal else None
        found.append(
            Flag(
                name=flag_of(item.name),
                destination=item.name,
                help=item.metadata["help"],
                type=str if choices else kind,
                default=item.default,
                choices=choices,
                metavar=item.metadata["metavar"],
                bounds=item.metadata["bounds"] if kind is int else None,
                const=item.metadata["const"],
                readers=(*readers, *item.metadata["used_by"]),
            )
        )
    return tuple(found)


def read_flags(group: type[Group], arguments: argparse.Namespace) -> Group:
    """Return the values of ``group``'s flags as the host parsed them; ``ConfigError`` names an invalid one.

    The host may have registered a flag itself, with another type or without a default, or may lack it.
    """
    import msgspec

    flags = {flag.destination: flag for flag in flags_of(group)}
    given = {name: getattr(arguments, name, flag.default) for name, flag in flags.items()}
    given = {name: flags[name].default if value is None else value for name, value in given.items()}
    try:
        read = msgspec.convert(given, group, strict=False)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ConfigError(f"{flags[name].name}: {reason}, got {shown(repr(given[name]))}.") from error
    for name, flag in flags.items():
        value = getattr(read, name)
        if isinstance(value, str) and not value.strip():
            raise ConfigError(f"{flag.name} {_BLANK}.")
        if flag.bounds is not None and value is not None and (wanted := flag.bounds.refusal(value)) is not None:
            raise ConfigError(f"{flag.name} {wanted}, got {shown(value)}.")
    return read
