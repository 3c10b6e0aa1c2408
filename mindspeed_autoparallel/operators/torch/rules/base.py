"""The input of a rule (``Call``), its result (``Rule``), and the simplest rules."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mindspeed_autoparallel.operators.graph.node import Axis

Dims = tuple[int | None, ...]
Shape = tuple[int, ...]

TENSOR = object()
"""Stands for a tensor among the plain arguments."""


@dataclass(frozen=True)
class Call:
    """One call of an operator: the shapes of its tensors in order, its arguments, and the shape of the output.

    ``plain`` has the positional arguments, with ``TENSOR`` for every tensor; ``index`` selects one of several outputs.
    """

    operator: str
    shapes: tuple[Shape, ...]
    plain: tuple[Any, ...]
    output: Shape
    index: int = 0

    def argument(self, position: int, default: Any) -> Any:
        """Return the argument at ``position``, or ``default`` if the call omits it."""
        return self.plain[position] if len(self.plain) > position else default


@dataclass(frozen=True)
class Rule:
    """The fields of a ``Node`` that follow from the operator: its axes, and their dims in every tensor."""

    kind: str
    axes: tuple[Axis, ...]
    operands: tuple[Dims, ...]
    output: Dims
    matmul: tuple[tuple[int, ...], int, int] | None = None
    flops: int = 0


def axes_of(shape: Shape, never: Collection[int] = ()) -> tuple[Axis, ...]:
    """Make one axis per dim of ``shape``; those in ``never`` are not cut."""
    return tuple(Axis(f"dim{d}", size, cuttable=d not in never) for d, size in enumerate(shape))


def aligned(shape: Shape, output: Shape) -> Dims:
    """Align the dims of ``shape`` to the right of ``output``; a dim that is broadcast is never cut."""
    first = len(output) - len(shape)
    return tuple(first + d if size == output[first + d] else None for d, size in enumerate(shape))


def pointwise(call: Call) -> Rule:
    """Cut every dim; operands are broadcast."""
    operands = tuple(aligned(shape, call.output) for shape in call.shapes)
    return Rule("pointwise", axes_of(call.output), operands, tuple(range(len(call.output))))


def draw(call: Call) -> Rule:
    """Cut a draw with one probability by every dim; raise ``ValueError`` if the input holds the probabilities."""
    if call.argument(1, None) is None:
        raise ValueError("probabilities by value")
    return pointwise(call)


def constant(call: Call) -> Rule:
    """Make the same tensor on every device; raise ``ValueError`` for one made of tensors (``linspace`` to a tensor)."""
    if call.shapes and not call.operator.startswith("new_"):
        raise ValueError("a constant made of tensors")
    return Rule("constant", (), (), (None,) * len(call.output))
