"""Megatron's order of ranks, and bytes that a redistribution moves: by a plan, and by gather-then-slice."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.runtime.hetero.redistribution.placement import (
    Item,
    Placement,
    num_replicas,
    sized_placement,
)
from mindspeed_autoparallel.runtime.hetero.redistribution.plan import Piece, RedistributionPlan

_SCALAR_BYTES = 4
"""Of a loss, and of its weight: fp32."""


def standard_placement(world_size: int, *, tensor: int = 1, context: int = 1, pipeline: int = 1) -> Placement:
    """Return Megatron's default order, tensor fastest, then context, data, pipeline. ``ValueError`` if sizes don't
    divide."""
    if world_size % (tensor * context * pipeline):
        raise ValueError(f"{world_size} ranks are not a multiple of tp {tensor} x cp {context} x pp {pipeline}")
    return sized_placement(world_size, tensor, context, pipeline)


def received_bytes(pieces: Sequence[Piece], rank: int, row_bytes: int) -> int:
    """Return bytes that travel to ``rank``; rows it already holds cost nothing."""
    return sum((p.stop - p.start) * row_bytes for p in pieces if p.target == rank and p.source != rank)


def sent_bytes(pieces: Sequence[Piece], rank: int, row_bytes: int) -> int:
    """Return bytes that travel from ``rank``."""
    return sum((p.stop - p.start) * row_bytes for p in pieces if p.source == rank and p.target != rank)


def gather_then_slice_bytes(
    items: Sequence[Item],
    owners: Sequence[int],
    *,
    encoder: Placement,
    backbone: Placement,
    input_row_bytes: int,
    output_row_bytes: int,
) -> int:
    """Return bytes each rank receives when padded inputs are gathered over DP_L and padded outputs over DP_E, forward.

    ``(DP_L - 1) max P F + (DP_E - 1) max T H``: P the rows of one backbone replica, T of one encoder replica, both
    padded to the largest.
    """
    dp_backbone, dp_encoder = num_replicas(backbone), num_replicas(encoder)
    inputs = [sum(i.input_rows for i in items if i.dp_replica == replica) for replica in range(dp_backbone)]
    outputs = [
        sum(i.output_rows for i, owner in zip(items, owners, strict=True) if owner == replica)
        for replica in range(dp_encoder)
    ]
    return (dp_backbone - 1) * max(inputs) * input_row_bytes + (dp_encoder - 1) * max(outputs) * output_row_bytes


def generator_bytes(
    plan: RedistributionPlan,
    losses: RedistributionPlan,
    rank: int,
    *,
    target_row_bytes: int,
    row_bytes: int,
    trains: bool,
) -> dict[str, int]:
    """Return bytes a generator's microbatch brings to ``rank``, by kind: targets, the decoder's rows and their weights
    are its inputs, the losses (by the plan ``losses``) its outputs, the rows' gradients go back."""
    weight_bytes = _SCALAR_BYTES if trains else 0
    rows = received_bytes(plan.gradients, rank, row_bytes + weight_bytes)
    return {
        "inputs": received_bytes(plan.inputs, rank, target_row_bytes) + rows,
        "outputs": received_bytes(losses.outputs, rank, _SCALAR_BYTES),
        "gradients": received_bytes(plan.outputs, rank, row_bytes) if trains else 0,
    }
