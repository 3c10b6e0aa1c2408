"""Rules of a mixture-of-experts layer with balanced experts: all have the same number of token slots."""

from __future__ import annotations

import math

from mindspeed_autoparallel.operators.graph.node import Axis, Node


def router(name: str, inputs: tuple[str, str], rows: int, hidden: int, experts: int, *, role: str = "") -> Node:
    """Return the operator that scores tokens (rows, hidden) by a weight (hidden, experts), with softmax: only tokens
    may be cut."""
    axes = (Axis("rows", rows), Axis("hidden", hidden, cuttable=False), Axis("experts", experts, cuttable=False))
    flops = 2 * rows * hidden * experts
    return Node(name, "router", axes, (rows, experts), (0, 2), inputs, ((0, 1), (1, 2)), role=role, flops=flops)


def dispatch(
    name: str, inputs: tuple[str, str], rows: int, hidden: int, experts: int, slots: int, *, role: str = ""
) -> Node:
    """Return the operator from tokens (rows, hidden) and their scores to (experts, slots, hidden).

    Cut by rows, a device fills its share of every expert's slots; cut by experts, it needs all tokens.
    """
    axes = (Axis("rows", math.gcd(rows, slots)), Axis("hidden", hidden), Axis("experts", experts))
    operands = ((0, 1), (0, None))
    return Node(name, "dispatch", axes, (experts, slots, hidden), (2, 0, 1), inputs, operands, role=role)


def expert_product(
    name: str, inputs: tuple[str, str], experts: int, slots: int, columns: int, inner: int, *, role: str = ""
) -> Node:
    """Return (experts, slots, inner) times (experts, inner, columns); its I axes are slots, then experts."""
    axes = (Axis("experts", experts), Axis("rows", slots), Axis("columns", columns), Axis("inner", inner))
    return Node(
        name,
        "experts",
        axes,
        (experts, slots, columns),
        (0, 1, 2),
        inputs,
        ((0, 1, 3), (0, 3, 2)),
        role=role,
        flops=2 * experts * slots * columns * inner,
        matmul=((1, 0), 2, 3),
    )


def combine(
    name: str, inputs: tuple[str, str], rows: int, hidden: int, experts: int, slots: int, *, role: str = ""
) -> Node:
    """Return the operator from (experts, slots, hidden) and scores back to tokens (rows, hidden): a sum over experts,
    pending if they are cut."""
    axes = (Axis("rows", math.gcd(rows, slots)), Axis("hidden", hidden), Axis("experts", experts))
    return Node(name, "combine", axes, (rows, hidden), (0, 1), inputs, ((2, 0, 1), (0, 2)), role=role)
