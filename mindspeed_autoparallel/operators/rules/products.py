"""Rules of the operators a transformer is made of, with their axes by name."""

from __future__ import annotations

import math

from mindspeed_autoparallel.operators.graph.node import Axis, Node


def source(
    name: str,
    shape: tuple[int, ...],
    *,
    parameter: bool = False,
    frozen: bool = False,
    role: str = "",
    item_bytes: int = 2,
) -> Node:
    """Return a parameter or an input of the model: any dim may be cut; a ``frozen`` parameter gets no gradient."""
    dims = tuple(range(len(shape)))
    axes = tuple(Axis(f"dim{d}", size) for d, size in enumerate(shape))
    return Node(
        name,
        "parameter" if parameter else "input",
        axes,
        shape,
        dims,
        role=role,
        item_bytes=item_bytes,
        is_parameter=parameter,
        needs_gradient=parameter and not frozen,
    )


def matrix_product(name: str, inputs: tuple[str, str], rows: int, columns: int, inner: int) -> Node:
    """Return the product of A(rows, inner) and B(inner, columns)."""
    axes = (Axis("rows", rows), Axis("columns", columns), Axis("inner", inner))
    operands, flops = ((0, 2), (2, 1)), 2 * rows * columns * inner
    return Node(name, "matmul", axes, (rows, columns), (0, 1), inputs, operands, flops=flops, matmul=((0,), 1, 2))


def pointwise(name: str, inputs: tuple[str, ...], shape: tuple[int, ...]) -> Node:
    """Return an elementwise operator on tensors of one ``shape``, (rows, columns) or with experts first; every dim may
    be cut."""
    dims = tuple(range(len(shape)))
    axes = tuple(Axis(n, size) for n, size in zip(("experts", "rows", "columns")[-len(shape) :], shape, strict=True))
    return Node(name, "pointwise", axes, shape, dims, inputs, (dims,) * len(inputs))


def norm(name: str, inputs: tuple[str, str], rows: int, hidden: int) -> Node:
    """Return a norm over the last dim, which is never cut; the second input is its weight."""
    axes = (Axis("rows", rows), Axis("hidden", hidden, cuttable=False))
    return Node(name, "norm", axes, (rows, hidden), (0, 1), inputs, ((0, 1), (1,)))


def gather(name: str, inputs: tuple[str, str], rows: int, hidden: int, table: int) -> Node:
    """Return the look-up of table rows (first input) by index (second).

    The index and the width may be cut, and the rows of the table, which leaves a pending sum.
    """
    axes = (Axis("rows", rows), Axis("hidden", hidden), Axis("table", table))
    return Node(name, "gather", axes, (rows, hidden), (0, 1), inputs, ((2, 1), (0,)))


def attention(
    name: str, inputs: tuple[str, str, str], batch: int, sequence: int, heads: int, kv_heads: int, head: int
) -> Node:
    """Return fused attention of q, k and v, with output (batch x sequence, heads x head); batch and heads may be cut.

    The axis of the rows has the size of the batch, since only whole samples may be cut; that of the columns has the
    greatest common divisor of the numbers of heads and key heads.
    """
    rows = batch * sequence
    axes = (Axis("batch", batch), Axis("heads", math.gcd(heads, kv_heads)))
    flops = 4 * rows * sequence * heads * head
    return Node(name, "attention", axes, (rows, heads * head), (0, 1), inputs, ((0, 1),) * 3, flops=flops)


def router(name: str, inputs: tuple[str, str], rows: int, hidden: int, experts: int) -> Node:
    """Return the operator that scores tokens (rows, hidden) by a weight (hidden, experts), with softmax: only tokens
    may be cut."""
    axes = (Axis("rows", rows), Axis("hidden", hidden, cuttable=False), Axis("experts", experts, cuttable=False))
    flops = 2 * rows * hidden * experts
    return Node(name, "router", axes, (rows, experts), (0, 2), inputs, ((0, 1), (1, 2)), flops=flops)


def dispatch(name: str, inputs: tuple[str, str], rows: int, hidden: int, experts: int, slots: int) -> Node:
    """Return the operator from tokens (rows, hidden) and their scores to (experts, slots, hidden).

    Cut by rows, a device fills its share of every expert's slots; cut by experts, it needs all tokens.
    """
    axes = (Axis("rows", math.gcd(rows, slots)), Axis("hidden", hidden), Axis("experts", experts))
    operands = ((0, 1), (0, None))
    return Node(name, "dispatch", axes, (experts, slots, hidden), (2, 0, 1), inputs, operands)


def expert_product(name: str, inputs: tuple[str, str], experts: int, slots: int, columns: int, inner: int) -> Node:
    """Return (experts, slots, inner) times (experts, inner, columns); its I axes are slots, then experts."""
    axes = (Axis("experts", experts), Axis("rows", slots), Axis("columns", columns), Axis("inner", inner))
    shape, operands, flops = (experts, slots, columns), ((0, 1, 3), (0, 3, 2)), 2 * experts * slots * columns * inner
    return Node(name, "experts", axes, shape, (0, 1, 2), inputs, operands, flops=flops, matmul=((1, 0), 2, 3))


def combine(name: str, inputs: tuple[str, str], rows: int, hidden: int, experts: int, slots: int) -> Node:
    """Return the operator from (experts, slots, hidden) and scores back to tokens (rows, hidden): a sum over experts,
    pending if they are cut."""
    axes = (Axis("rows", math.gcd(rows, slots)), Axis("hidden", hidden), Axis("experts", experts))
    return Node(name, "combine", axes, (rows, hidden), (0, 1), inputs, ((2, 0, 1), (0, 2)))
