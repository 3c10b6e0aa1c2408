"""Output of a pipeline chunk before the text decoder: rows of unfinished and finished encoders in one tensor.

One stream is sent as it is (``[rows, 1, width]``); several are sent flat and concatenated, as ``[numbers, 1, 1]``. The
receiver computes every shape from the batch, which all stages read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def pack(streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return one tensor of three dimensions, as Megatron's pipeline sends it."""
    tensors = list(streams.values())
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor.flatten() for tensor in tensors]).view(-1, 1, 1)


def unpack(carried: torch.Tensor, shapes: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Split the streams. ``shapes``: (rows, width) of each in the order of ``pack``."""
    if len(shapes) == 1:
        return dict.fromkeys(shapes, carried)
    parts = carried.flatten().split([rows * width for rows, width in shapes.values()])
    return {name: part.view(rows, 1, width) for part, (name, (rows, width)) in zip(parts, shapes.items(), strict=True)}


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(received)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (received,) = ctx.saved_tensors
        return grads[0], torch.zeros_like(received)


def keep_backward_alive(output: torch.Tensor, received: torch.Tensor | None) -> torch.Tensor:
    """Return ``output`` whose backward reaches ``received`` even if everything in between is frozen.

    Pipeline schedules send a gradient for every tensor they received and start from every tensor they sent. A chunk
    of frozen layers has neither: it gets an anchor instead, and returns zeros.
    """
    if not torch.is_grad_enabled():
        return output
    anchor = (
        torch.zeros(1, dtype=output.dtype, device=output.device, requires_grad=True) if received is None else received
    )
    joined: torch.Tensor = _Join.apply(output, anchor)
    return joined
