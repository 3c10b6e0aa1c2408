"""Rules of operators that rename, move or repeat elements."""

from __future__ import annotations

import math

from mindspeed_autoparallel.operators.graph.node import Axis
from mindspeed_autoparallel.operators.torch.rules.base import Call, Dims, Rule, axes_of


def reshape(call: Call) -> Rule:
    """Cut the first dim of every group that is split or joined, as far as both sides divide."""
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
    """Move every dim with its cut."""
    rank = len(call.output)
    order = list(range(rank))
    if call.operator == "permute":
        order = [int(d) % rank for d in call.plain[1]]
    elif rank >= 2:
        first, second = (0, 1) if call.operator == "t" else (int(call.plain[1]) % rank, int(call.plain[2]) % rank)
        order[first], order[second] = order[second], order[first]
    return Rule("transpose", axes_of(call.shapes[0]), (tuple(range(rank)),), tuple(order))


def part_of_dim(call: Call) -> Rule:
    """Cut every dim but the one that slice, split or cat act on, select and unbind drop, or stack adds."""
    given, operator = call.shapes[0], call.operator
    position = 1 if operator in ("unbind", "select", "slice", "cat", "stack") else 2
    value = call.argument(position, 0)
    dims = tuple(range(len(given)))
    if operator == "stack":
        dim = int(value or 0) % len(call.output)
        made: Dims = (*range(dim), None, *range(dim, len(given)))
        return Rule("slice", axes_of(given), (dims,) * len(call.shapes), made)
    if any(len(shape) != len(given) for shape in call.shapes):
        raise ValueError("tensors of different ranks")
    dim = int(value or 0) % len(given)
    rest = tuple(d for d in dims if d != dim)
    output = rest if operator in ("select", "unbind") else dims
    return Rule("slice", axes_of(given, (dim,)), (dims,) * len(call.shapes), output)


def slice_scatter(call: Call) -> Rule:
    """Cut every dim but the one that is written along, which the source of select_scatter lacks."""
    given, source = call.shapes
    dim = int(call.argument(2, 0)) % len(given)
    dims = tuple(range(len(given)))
    written = dims if len(source) == len(given) else tuple(d for d in dims if d != dim)
    return Rule("slice", axes_of(given, (dim,)), (dims, written), dims)


def turned(call: Call) -> Rule:
    """Cut every dim but those that roll and flip act on."""
    rank = len(call.output)
    value = call.argument(2 if call.operator == "roll" else 1, ())
    acted = range(rank) if call.operator == "roll" and not value else value
    never = {int(d) % rank for d in (acted if isinstance(acted, (list, tuple, range)) else [acted])}
    dims = tuple(range(rank))
    return Rule("slice", axes_of(call.output, never), (dims,), dims)


def repeated(call: Call) -> Rule:
    """Cut the dims whose size repeat does not change."""
    given, output = call.shapes[0], call.output
    new = len(output) - len(given)
    kept = [d for d in range(len(given)) if given[d] == output[new + d]]
    dims = tuple(d if d in kept else None for d in range(len(given)))
    return Rule("slice", axes_of(given, set(range(len(given))) - set(kept)), (dims,), ((None,) * new + dims))


_PLACES = {"1d": 1, "2d": 2, "3d": 3}
_TRAILING = {"pixel_shuffle": 3, "pixel_unshuffle": 3, "tril": 2, "triu": 2}


def leading(call: Call) -> Rule:
    """Cut the dims before those that pooling, resizing, padding or a triangle act on: samples and channels."""
    given = call.shapes[0]
    name = call.operator
    if name == "constant_pad_nd":
        trailing = len(call.plain[1]) // 2
    else:
        trailing = _TRAILING.get(name) or next(n for text, n in _PLACES.items() if text in name)
    rank = len(given)
    if rank - trailing < 1 or len(call.output) != rank:
        raise ValueError("no dim before those acted on")
    dims = tuple(d if d < rank - trailing and given[d] == call.output[d] else None for d in range(rank))
    never = {d for d in range(rank) if dims[d] is None}
    return Rule("pool", axes_of(given, never), (dims,), dims)
