"""The input of a rule (``Call``), its result (``Rule``), the simplest rules, and those of norms, softmax and sums."""

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


def normalised(call: Call) -> Rule:
    """Cut layer and RMS norm by all dims but the normalised ones."""
    rank, count = len(call.output), len(call.plain[1])
    never = tuple(range(rank - count, rank))
    operands = (tuple(range(rank)), *(never for _ in call.shapes[1:]))
    return Rule("norm", axes_of(call.output, never), operands, tuple(range(rank)))


def group_norm(call: Call) -> Rule:
    """Cut samples and whole groups of channels."""
    given, groups = call.shapes[0], int(call.plain[1])
    dims = (0, 1, *(None,) * (len(given) - 2))
    operands = (dims, *((1,) for _ in call.shapes[1:]))
    return Rule("norm", (Axis("rows0", given[0]), Axis("groups", groups)), operands, dims)


def channel_norm(call: Call) -> Rule:
    """Cut batch norm in evaluation by every dim; its statistics and weights are one value per channel."""
    if call.index:
        raise ValueError("the saved statistics")
    dims = tuple(range(len(call.output)))
    operands = (dims, *((1,) for _ in call.shapes[1:]))
    return Rule("norm", axes_of(call.output), operands, dims)


def along(call: Call) -> Rule:
    """Cut softmax, sorting, running sums and the like by every dim but the one they run along."""
    given = call.shapes[0]
    position, default = (2, -1) if call.operator == "topk" else (1, -1)
    if call.operator in ("kthvalue",):
        position = 2
    dim = int(call.argument(position, default)) % len(given)
    dims = tuple(range(len(given)))
    output: Dims = dims if len(call.output) == len(given) else tuple(d for d in dims if d != dim)
    return Rule("softmax", axes_of(given, (dim,)), (dims,), output)


def reduction(call: Call) -> Rule:
    """Cut a reduction by the dims that stay; a sum also by those it reduces, which leaves a pending sum."""
    if len(call.shapes) == 2 and call.operator in ("max", "min"):
        return pointwise(call)  # the larger of two tensors
    if len(call.shapes) != 1:
        raise ValueError("a reduction of several tensors")
    given = call.shapes[0]
    chosen = call.argument(2 if call.operator == "linalg_vector_norm" else 1, None)
    if isinstance(chosen, bool) or chosen is None or chosen == []:  # var(x, unbiased)
        chosen = list(range(len(given)))
    dims = {int(d) % len(given) for d in (chosen if isinstance(chosen, (list, tuple)) else [chosen])}
    kept = len(call.output) == len(given)
    output: Dims = tuple(None if d in dims else d for d in range(len(given)) if kept or d not in dims)
    never = () if call.operator == "sum" else tuple(dims)
    return Rule("reduce", axes_of(given, never), (tuple(range(len(given))),), output)
