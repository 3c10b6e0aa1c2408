"""Rules of products: matrices, convolutions, fused attention, groups of experts."""

from __future__ import annotations

import math

from mindspeed_autoparallel.operators.graph.node import Axis
from mindspeed_autoparallel.operators.torch.rules.base import Call, Rule, aligned, axes_of


def linear(call: Call) -> Rule:
    """Cut x(.., k) times the transpose of w(j, k) by rows, columns and inner; a bias is a separate operator."""
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
    """Cut A(.., i, k) times B(k, j), a product with a vector, or a batched product (no main operator)."""
    first, second = call.shapes[:2]
    if len(second) == 2 and len(first) >= 2:
        rows = tuple(range(len(first) - 1))
        j, k = len(rows), len(rows) + 1
        axes = (*(Axis(f"rows{d}", n) for d, n in enumerate(first[:-1])), Axis("columns", second[1]))
        axes = (*axes, Axis("inner", second[0]))
        return Rule("matmul", axes, ((*rows, k), (k, j)), (*rows, j), (rows, j, k), 2 * math.prod(first) * second[1])
    if len(first) == 1 or len(second) == 1:
        return _with_vector(call)
    lead = len(call.output) - 2
    axes = (*axes_of(call.output[:-2]), Axis("rows", first[-2]), Axis("columns", second[-1]), Axis("inner", first[-1]))
    i, j, k = lead, lead + 1, lead + 2
    return Rule(
        "batched_matmul",
        axes,
        ((*aligned(first[:-2], call.output[:-2]), i, k), (*aligned(second[:-2], call.output[:-2]), k, j)),
        (*range(lead), i, j),
        flops=2 * math.prod(call.output) * first[-1],
    )


def _with_vector(call: Call) -> Rule:
    """Cut a product with a vector on one side or both by every dim of the result and the inner one."""
    first, second = call.shapes[:2]
    rest = first[:-1] if len(second) == 1 else second[:-2] + second[-1:]
    axes = (*(Axis(f"rows{d}", n) for d, n in enumerate(rest)), Axis("inner", first[-1]))
    lead, k = tuple(range(len(rest))), len(rest)
    flops = 2 * math.prod(rest) * first[-1]
    if len(second) == 1:
        return Rule("batched_matmul", axes, ((*lead, k), (k,)), lead, flops=flops)
    return Rule("batched_matmul", axes, ((k,), (*lead[:-1], k, lead[-1])), lead, flops=flops)


def baddbmm(call: Call) -> Rule:
    """Cut like a batched product, but not by the inner axis: its parts would each add the added tensor."""
    product = matmul(Call(call.operator, call.shapes[1:], call.plain, call.output))
    axes = tuple(Axis(a.name, a.size, cuttable=a.name != "inner") for a in product.axes)
    operands = (aligned(call.shapes[0], call.output), *product.operands)
    return Rule("batched_matmul", axes, operands, product.output, flops=product.flops)


GROUPS_ARGUMENT = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), 6),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), 6),
    "convolution": 8,
    "group_norm": 1,
}
"""Position of the number of groups among an operator's arguments."""


def convolution(call: Call) -> Rule:
    """Cut samples, output channels and input channels (a pending sum); with groups, samples and groups of channels.

    Spatial dims are never cut: pieces would need their neighbours' borders.
    """
    given, weight = call.shapes[:2]
    if len(given) != len(weight):
        raise ValueError("a convolution without a batch dim")
    groups = int(call.argument(GROUPS_ARGUMENT[call.operator], 1))
    transposed = "transpose" in call.operator or (call.operator == "convolution" and bool(call.argument(6, False)))
    none: tuple[None, ...] = (None,) * (len(given) - 2)
    flops = 2 * math.prod(call.output) * math.prod(weight[2:]) * given[1] // groups
    if transposed:
        flops = 2 * math.prod(given) * math.prod(weight[1:])
    if groups > 1:
        axes = (Axis("rows0", given[0]), Axis("groups", groups))
        return Rule("convolution", axes, ((0, 1, *none), (1, None, *none)), (0, 1, *none), flops=flops)
    wide = (Axis("rows0", given[0]), Axis("columns", call.output[1]), Axis("inner", given[1]))
    kernel = (2, 1) if transposed else (1, 2)
    return Rule("convolution", wide, ((0, 2, *none), (*kernel, *none)), (0, 1, *none), ((0,), 1, 2), flops)


def attention(call: Call) -> Rule:
    """Cut fused attention of (.., heads, sequence, head) by batch, and by heads as far as key heads divide, too."""
    q, k = call.shapes[:2]
    rank = len(q)
    axes = [Axis(f"batch{d}", n) for d, n in enumerate(q[:-3])]
    axes += [Axis("heads", math.gcd(q[-3], k[-3])), Axis("sequence", q[-2], cuttable=False)]
    axes += [Axis("head", q[-1], cuttable=False)]
    dims = tuple(range(rank))
    mask = tuple(
        tuple(d if d is not None and d < rank - 2 else None for d in aligned(shape, (*q[:-1], k[-2])))
        for shape in call.shapes[3:]
    )
    flops = 4 * math.prod(q) * k[-2]
    return Rule("attention", tuple(axes), (dims, dims, dims, *mask), dims, flops=flops)


def grouped_matmul(call: Call) -> Rule:
    """Cut (rows, k) times (experts, k, j), with the end of each expert's rows, by columns and inner.

    Rows and experts stay whole: which rows belong to an expert depends on values.
    """
    first, second = call.shapes[:2]
    if len(first) != 2 or len(second) != 3:
        raise ValueError("a grouped product of another form")
    axes = (Axis("columns", second[2]), Axis("inner", second[1]))
    ends = tuple((None,) * len(shape) for shape in call.shapes[2:])
    flops = 2 * math.prod(first) * second[2]
    return Rule("batched_matmul", axes, ((None, 1), (None, 1, 0), *ends), (None, 0), flops=flops)


def recurrent(call: Call) -> Rule:
    """Cut LSTM, GRU and plain recurrent layers by samples; every step needs all channels of the previous one.

    Dropout between layers draws for the whole batch, so with it nothing is cut.
    """
    has_states = 2 if call.operator == "lstm" else 1
    after = 3  # input, states, weights
    layers, dropout, train, _, batch_first = call.plain[after + 1 : after + 6]
    if len(call.shapes[0]) != 3 or (dropout > 0 and train and layers > 1):
        raise ValueError("a recurrent layer without a batch dim, or with dropout")
    given = call.shapes[0]
    at = 0 if batch_first else 1
    sample = tuple(0 if d == at else None for d in range(3))
    state = (None, 0, None)
    weights = tuple((None,) * len(shape) for shape in call.shapes[1 + has_states :])
    flops = 2 * given[0] * given[1] * sum(math.prod(shape) for shape in call.shapes[1 + has_states :])
    output = sample if call.index == 0 else state
    return Rule(
        "recurrent", (Axis("rows0", given[at]),), (sample, *(state,) * has_states, *weights), output, flops=flops
    )
