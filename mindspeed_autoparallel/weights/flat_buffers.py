"""Positions of parameters in a flat buffer of Megatron's distributed optimizer, found by their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed_autoparallel.errors import ConfigError

if TYPE_CHECKING:
    import torch

ALIGNED = 64
"""Alignment: a parameter begins at a multiple of this number of values in its bucket."""


def placed(named: dict[str, torch.Tensor], flat: Any, where: object) -> dict[str, int]:
    """Return name -> first value in ``flat`` (fp32, one dimension) of the tensors ``named``, in their order.

    Megatron stores them from the last to the first, aligned in buckets whose ends it does not record: after every
    parameter the next one follows aligned, or at once in a new bucket. Every returned position holds the bits of
    its tensor. Raises ``ConfigError`` if there is no such sequence.
    """
    order = list(reversed(named.items()))
    # Choices not yet tried: (number of the tensor, its place, first value of its bucket).
    waiting: list[tuple[int, int, int]] = [(0, 0, 0)]
    begins = [0] * len(order)
    furthest = 0
    while waiting:
        number, begin, bucket = waiting.pop()
        tensor = order[number][1]
        if not _holds(flat, begin, tensor):
            continue
        begins[number] = begin
        furthest = max(furthest, number + 1)
        end = begin + tensor.numel()
        if number + 1 == len(order):
            if end <= flat.numel() < end + ALIGNED:
                return {one: begins[at] for at, (one, _) in enumerate(order)}
            continue
        waiting += [(number + 1, *choice) for choice in _next(end, bucket)]
    lost = order[min(furthest, len(order) - 1)][0]
    raise ConfigError(
        f"{where}: the place of {lost} in the optimizer's buffer cannot be proved: {furthest} of {len(order)} weights "
        "were found. It was frozen, or the optimizer is of another step than the weights. Give --weights-only."
    )


def aligned(end: int, bucket: int) -> int:
    """Return the position of the parameter after one that ends at ``end`` in the bucket that begins at ``bucket``."""
    return bucket + -(-(end - bucket) // ALIGNED) * ALIGNED


def _next(end: int, bucket: int) -> Iterator[tuple[int, int]]:
    """Yield candidate (position, bucket) of the parameter after one that ends at ``end``; the likeliest last."""
    begin = aligned(end, bucket)
    if begin != end:
        yield end, end
    yield begin, bucket


def _holds(flat: Any, begin: int, tensor: Any) -> bool:
    import torch

    values = flat[begin : begin + tensor.numel()]
    if values.numel() < tensor.numel():
        return False
    return bool(torch.equal(values.to(tensor.dtype), tensor.detach().reshape(-1)))
