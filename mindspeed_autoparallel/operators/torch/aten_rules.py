"""What each aten operator of an exported graph may cut: its axes, and where they sit in every operand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.operators.graph.node import Axis

Dims = tuple[int | None, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call: ``args`` with every tensor replaced by its shape in ``shapes`` (in order), and the output's shape."""

    operator: str
    shapes: tuple[Shape, ...]
    plain: tuple[Any, ...]
    """Arguments in the order of the schema; a tensor is None there."""
    output: Shape


@dataclass(frozen=True)
class Rule:
    """The parts of a ``Node`` that the operator's meaning gives."""

    kind: str
    axes: tuple[Axis, ...]
    operands: tuple[Dims, ...]
    output: Dims
    matmul: tuple[tuple[int, ...], int, int] | None = None
    flops: int = 0
    detail: dict[str, int] = field(default_factory=dict)


def _axes(shape: Shape, never: tuple[int, ...] = ()) -> tuple[Axis, ...]:
    return tuple(Axis(f"dim{d}", size, cuttable=d not in never) for d, size in enumerate(shape))


def _aligned(shape: Shape, output: Shape) -> Dims:
    """Dims of ``shape`` right-aligned to ``output``; a dim that is broadcast is never cut."""
    first = len(output) - len(shape)
    return tuple(first + d if size == output[first + d] else None for d, size in enumerate(shape))


def pointwise(call: Call) -> Rule:
    return Rule(
        "pointwise",
        _axes(call.output),
        tuple(_aligned(shape, call.output) for shape in call.shapes),
        tuple(range(len(call.output))),
    )


def linear(call: Call) -> Rule:
    """x(.., k) times the transpose of w(j, k); a bias is an operator of its own (see ``capture``)."""
    given, weight = call.shapes[:2]
    rows = len(given) - 1
    axes = (
        *(Axis(f"rows{d}", n) for d, n in enumerate(given[:-1])),
        Axis("columns", weight[0]),
        Axis("inner", weight[1]),
    )
    lead = tuple(range(rows))
    flops = 2 * math.prod(given) * weight[0]
    return Rule("matmul", axes, ((*lead, rows + 1), (rows, rows + 1)), (*lead, rows), (lead, rows, rows + 1), flops)


def matmul(call: Call) -> Rule:
    """A(.., i, k) times B(k, j), or batched B(.., k, j) with the same leading dims: that one is no main operator."""
    first, second = call.shapes[:2]
    if len(second) == 2 and len(first) >= 2:
        rows = tuple(range(len(first) - 1))
        j, k = len(rows), len(rows) + 1
        axes = (*(Axis(f"rows{d}", n) for d, n in enumerate(first[:-1])), Axis("columns", second[1]))
        axes = (*axes, Axis("inner", second[0]))
        return Rule("matmul", axes, ((*rows, k), (k, j)), (*rows, j), (rows, j, k), 2 * math.prod(first) * second[1])
    lead = len(call.output) - 2
    axes = (*_axes(call.output[:-2]), Axis("rows", first[-2]), Axis("columns", second[-1]), Axis("inner", first[-1]))
    i, j, k = lead, lead + 1, lead + 2
    return Rule(
        "batched_matmul",
        axes,
        ((*_aligned(first[:-2], call.output[:-2]), i, k), (*_aligned(second[:-2], call.output[:-2]), k, j)),
        (*range(lead), i, j),
        flops=2 * math.prod(call.output) * first[-1],
    )


def baddbmm(call: Call) -> Rule:
    """The added tensor forbids cutting the inner axis: a pending sum would add it once per part."""
    product = matmul(Call(call.operator, call.shapes[1:], call.plain, call.output))
    axes = tuple(Axis(a.name, a.size, cuttable=a.name != "inner") for a in product.axes)
    operands = (_aligned(call.shapes[0], call.output), *product.operands)
    return Rule("batched_matmul", axes, operands, product.output, flops=product.flops)


def reshape(call: Call) -> Rule:
    """Dims that are split or joined keep the cut of the first of them, as far as both sides divide."""
    given, output = call.shapes[0], call.output
    axes: list[Axis] = []
    before: list[int | None] = [None] * len(given)
    after: list[int | None] = [None] * len(output)
    a = b = 0
    while a < len(given) and b < len(output):
        first, second, left, right = a, b, given[a], output[b]
        a, b = a + 1, b + 1
        while left != right and (a < len(given) or b < len(output)):
            if left < right and a < len(given):
                left, a = left * given[a], a + 1
            elif b < len(output):
                right, b = right * output[b], b + 1
            else:
                break
        leading = [
            next((d for d in range(s, e) if shape[d] != 1), s)
            for s, e, shape in ((first, a, given), (second, b, output))
        ]
        before[leading[0]] = after[leading[1]] = len(axes)
        axes.append(Axis(f"dim{leading[1]}", math.gcd(given[leading[0]], output[leading[1]])))
    return Rule("reshape", tuple(axes), (tuple(before),), tuple(after))


def permute(call: Call) -> Rule:
    rank = len(call.output)
    order = list(range(rank))
    if call.operator == "permute":
        order = [int(d) % rank for d in call.plain[1]]
    elif rank >= 2:
        first, second = (0, 1) if call.operator == "t" else (int(call.plain[1]) % rank, int(call.plain[2]) % rank)
        order[first], order[second] = order[second], order[first]
    return Rule("transpose", _axes(call.shapes[0]), (tuple(range(rank)),), tuple(order))


def normalised(call: Call) -> Rule:
    """Layer and RMS norm: the normalised dims are never cut."""
    rank, count = len(call.output), len(call.plain[1])
    never = tuple(range(rank - count, rank))
    operands = (tuple(range(rank)), *(never for _ in call.shapes[1:]))
    return Rule("norm", _axes(call.output, never), operands, tuple(range(rank)))


def along(call: Call) -> Rule:
    """Softmax and its kin: every dim but the one they run along."""
    dim = int(call.plain[1]) % len(call.output)
    dims = tuple(range(len(call.output)))
    return Rule("softmax", _axes(call.output, (dim,)), (dims,), dims)


def reduction(call: Call) -> Rule:
    """A sum may be cut along what it sums (a pending sum); a mean or a maximum may not."""
    given = call.shapes[0]
    chosen = call.plain[1] if len(call.plain) > 1 and call.plain[1] is not None else list(range(len(given)))
    dims = {int(d) % len(given) for d in (chosen if isinstance(chosen, (list, tuple)) else [chosen])}
    kept = len(call.output) == len(given)
    output: Dims = tuple(None if d in dims else d for d in range(len(given)) if kept or d not in dims)
    never = () if call.operator == "sum" else tuple(dims)
    return Rule("reduce", _axes(given, never), (tuple(range(len(given))),), output)


def part_of_dim(call: Call) -> Rule:
    """Slice, split, cat and roll: the dim they act on is not cut; select and unbind drop it, stack makes it."""
    given, operator = call.shapes[0], call.operator
    position = {"unbind": 1, "select": 1, "slice": 1, "cat": 1, "stack": 1}.get(operator, 2)
    value = call.plain[position] if len(call.plain) > position else 0
    dims = tuple(range(len(given)))
    if operator == "stack":
        dim = int(value or 0) % len(call.output)
        made: Dims = (*range(dim), None, *range(dim, len(given)))
        return Rule("slice", _axes(given), (dims,) * len(call.shapes), made)
    dim = int(value or 0) % len(given)
    rest = tuple(d for d in dims if d != dim)
    output = rest if operator in ("select", "unbind") else dims
    return Rule("slice", _axes(given, (dim,)), (dims,) * len(call.shapes), output)


def embedding(call: Call) -> Rule:
    """Rows of a table by index: index dims, width, and the rows of the table (a pending sum of masked look-ups)."""
    table, index = call.shapes
    lead = tuple(range(len(index)))
    axes = (*(Axis(f"rows{d}", n) for d, n in enumerate(index)), Axis("hidden", table[1]), Axis("table", table[0]))
    wide = len(index)
    return Rule("gather", axes, ((wide + 1, wide), lead), (*lead, wide))


def indexed(call: Call) -> Rule:
    """Entries of a table along its first dim by one tensor of indices. Rows of a table of two dims may be cut as those
    of an embedding; a table of one dim is never cut: there is no row to gather from a piece."""
    table, index = call.shapes
    along = call.plain[1]
    if not (along == 0 or (isinstance(along, (list, tuple)) and len(along) == 1)):
        raise ValueError(f"an index along {along}")
    if len(table) == 2:
        return embedding(call)
    lead = tuple(range(len(index)))
    axes = [Axis(f"rows{d}", n) for d, n in enumerate(index)]
    axes += [Axis(f"dim{d}", n) for d, n in enumerate(table) if d > 0]
    rest = tuple(range(len(index), len(axes)))
    return Rule("gather", tuple(axes), ((None, *rest), lead), (*lead, *rest))


def attention(call: Call) -> Rule:
    """Fused attention of (.., heads, sequence, head): batch and heads, key heads only where they divide."""
    q, k = call.shapes[:2]
    rank = len(q)
    axes = [Axis(f"batch{d}", n) for d, n in enumerate(q[:-3])]
    axes += [Axis("heads", math.gcd(q[-3], k[-3])), Axis("sequence", q[-2], cuttable=False)]
    axes += [Axis("head", q[-1], cuttable=False)]
    dims = tuple(range(rank))
    mask = tuple(
        tuple(d if d is not None and d < rank - 2 else None for d in _aligned(shape, (*q[:-1], k[-2])))
        for shape in call.shapes[3:]
    )
    flops = 4 * math.prod(q) * k[-2]
    return Rule("attention", tuple(axes), (dims, dims, dims, *mask), dims, flops=flops)


def constant(call: Call) -> Rule:
    return Rule("constant", (), (), (None,) * len(call.output))


def rule_of(operator: str, is_pointwise: bool) -> Callable[[Call], Rule] | None:
    """The rule of aten operator ``operator`` (no namespace, no overload); None where the meaning is not known."""
    return _RULES.get(operator) or (pointwise if is_pointwise or operator in _POINTWISE else None)


_POINTWISE = frozenset(
    [
        "clone",
        "contiguous",
        "_to_copy",
        "to",
        "dropout",
        "alias",
        "detach",
        "type_as",
        "masked_fill",
        "where",
        "lift_fresh_copy",
        "expand",
        "_unsafe_copy",
        "copy",
        "native_dropout",
        "silu",
        "gelu",
        "softplus",
        "relu",
        "mish",
        "hardswish",
        "expand_as",
        "zeros_like",
        "ones_like",
    ]
)
_RULES: dict[str, Callable[[Call], Rule]] = {
    "linear": linear,
    **dict.fromkeys(("mm", "matmul", "bmm"), matmul),
    "baddbmm": baddbmm,
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"), reshape),
    **dict.fromkeys(("permute", "transpose", "t"), permute),
    **dict.fromkeys(("layer_norm", "rms_norm", "native_layer_norm"), normalised),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "sort", "argsort"), along),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "argmax"), reduction),
    **dict.fromkeys(("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "cat", "stack"), part_of_dim),
    "embedding": embedding,
    **dict.fromkeys(("index", "index_select"), indexed),
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(("arange", "full", "ones", "zeros", "empty", "scalar_tensor", "_assert_tensor_metadata"), constant),
}
