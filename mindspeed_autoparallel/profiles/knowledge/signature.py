"""Everything of an operator call that is not a size: dtypes, orders of dimensions, attributes.

Times are interpolated within one signature only. As JSON a call is ``[args, {"map": kwargs}]``, the samples of a link
``{"tier", "ranks"}``, figures of one model its key, alone or as ``[key, layout]``; the column of the knowledge base
has the same as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.files import shown


@dataclass(frozen=True)
class TensorArgument:
    """A tensor, whose dimensions are among the operator's sizes."""

    dtype: str
    """torch's name, such as ``bfloat16``."""
    order: tuple[int, ...]
    """The dimensions from the slowest to the fastest in memory."""


@dataclass(frozen=True)
class SizeArgument:
    """A whole number that is one of the operator's sizes."""


@dataclass(frozen=True)
class ConstantArgument:
    """A dtype, a device or the like, as torch prints it."""

    text: str


@dataclass(frozen=True)
class NamedArguments:
    """Arguments by their names."""

    items: tuple[tuple[str, Argument], ...] = ()


Argument = (
    TensorArgument
    | SizeArgument
    | ConstantArgument
    | NamedArguments
    | tuple["Argument", ...]
    | str
    | int
    | float
    | bool
    | None
)


@dataclass(frozen=True)
class Call:
    """The arguments of an operator."""

    args: tuple[Argument, ...]
    kwargs: NamedArguments


@dataclass(frozen=True)
class Link:
    """The ranks that a collective was sampled on."""

    tier: str
    ranks: int


@dataclass(frozen=True)
class OfModel:
    """The model that a figure is of."""

    key: str
    layout: str | None = None
    """The label of the layout it was measured in; ``None``: any."""


Content = Call | Link | OfModel


class Signature:
    """A content that compares as it is written: 1, 1.0 and true are three signatures."""

    __slots__ = ("content", "text")

    def __init__(self, content: Content) -> None:
        self.content = content
        self.text = _text(content)
        """As the knowledge base's column has it."""

    @classmethod
    def of_json(cls, value: Any) -> Signature:
        """Read what ``json`` gives, or the text of the column; ``ProfileError`` for others."""
        if isinstance(value, str) and value[:1] in ("[", "{"):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise _unknown(value) from error
        return cls(_content(value))

    def json(self) -> Any:
        """Return plain JSON values; numbers that JSON lacks by name."""
        return _plain(self.content, strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Signature({self.text})"


def _text(content: Content) -> str:
    if isinstance(content, OfModel) and content.layout is None:
        return content.key
    return json.dumps(_plain(content, strict=False), separators=(",", ":"))


def _plain(value: Content | Argument, strict: bool) -> Any:
    """Return JSON values; ``strict``: NaN and infinity as objects, otherwise as the text of the column has them."""
    if isinstance(value, tuple):
        return [_plain(item, strict) for item in value]
    if isinstance(value, TensorArgument):
        return {"dtype": value.dtype, "order": list(value.order)}
    if isinstance(value, SizeArgument):
        return {"size": 1}
    if isinstance(value, ConstantArgument):
        return {"constant": value.text}
    if isinstance(value, NamedArguments):
        return {"map": {name: _plain(item, strict) for name, item in value.items}}
    if isinstance(value, Call):
        return [_plain(value.args, strict), _plain(value.kwargs, strict)]
    if isinstance(value, Link):
        return {"tier": value.tier, "ranks": value.ranks}
    if isinstance(value, OfModel):
        return value.key if value.layout is None else [value.key, value.layout]
    if strict and isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    return value


def _content(value: Any) -> Content:
    try:
        if isinstance(value, str):
            return OfModel(value)
        if isinstance(value, Mapping):
            return Link(str(value["tier"]), int(value["ranks"]))
        first, second = value
        if isinstance(first, str):
            return OfModel(first, str(second))
        args, kwargs = _argument(first), _argument(second)
    except (KeyError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise _unknown(value) from error
    if not isinstance(args, tuple) or not isinstance(kwargs, NamedArguments):
        raise _unknown(value)
    return Call(args, kwargs)


def _argument(value: Any) -> Argument:
    if isinstance(value, list):
        return tuple(_argument(item) for item in value)
    if not isinstance(value, Mapping):
        return value if isinstance(value, (str, int, float)) else None
    if "dtype" in value:
        return TensorArgument(str(value["dtype"]), tuple(int(axis) for axis in value["order"]))
    if "size" in value:
        return SizeArgument()
    if "constant" in value:
        return ConstantArgument(str(value["constant"]))
    if "number" in value:
        return float(value["number"])
    named = value.get("map", {})
    if not isinstance(named, Mapping):
        raise TypeError("arguments by name are a map")
    return NamedArguments(tuple((str(name), _argument(item)) for name, item in named.items()))


def _unknown(value: object) -> ProfileError:
    return ProfileError(
        f"{shown(str(value), 200)} is not a signature of an operator: a call is [args, {{'map': kwargs}}], see "
        "missing_operators.json of a tuning."
    )
