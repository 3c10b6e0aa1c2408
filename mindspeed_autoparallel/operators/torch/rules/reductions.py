"""Rules of operators that run along dims: norms, softmax, sums, sorting."""

from __future__ import annotations

from mindspeed_autoparallel.operators.graph.node import Axis
from mindspeed_autoparallel.operators.torch.rules.base import Call, Dims, Rule, axes_of, pointwise


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
