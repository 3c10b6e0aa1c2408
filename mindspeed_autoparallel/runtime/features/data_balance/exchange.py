"""Whole microbatches given to other replicas by one all-to-all, so that the work of replicas is even."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_autoparallel.data.balance import Shared


def gathered_works(works: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """Return the works of every replica's microbatches; ``group``: gloo, one rank of every replica."""
    if group is None:
        return [list(works)]
    own = torch.tensor(works, dtype=torch.float64)
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own, group=group)
    return [row.tolist() for row in every]


def exchange(batches: Sequence[Any], shared: Shared, group: dist.ProcessGroup | None) -> list[Any]:
    """Return this replica's microbatches in the order of training, after the others sent what is theirs."""
    rank = group.rank() if group is not None else 0
    number = len(batches)
    mine = shared.places[rank]
    held = {rank * number + index: batch for index, batch in enumerate(batches)}
    if group is not None and any(place // number != owner for owner, row in enumerate(shared.places) for place in row):
        held |= _received(held, shared, number, group)
    return [held[place] for place in mine]


def _received(held: dict[int, Any], shared: Shared, number: int, group: dist.ProcessGroup) -> dict[int, Any]:
    """Return the microbatches that others loaded, by place."""
    rank, size = group.rank(), group.size()
    sent = []
    for other in range(size):
        own = {place: held[place] for place in shared.places[other] if place in held and other != rank}
        sent.append(_packed(own) if own else torch.empty(0, dtype=torch.uint8))
    lengths = torch.tensor([len(part) for part in sent])
    others = torch.empty_like(lengths)
    dist.all_to_all_single(others, lengths, group=group)
    arrived = torch.empty(int(others.sum()), dtype=torch.uint8)
    dist.all_to_all_single(
        arrived, torch.cat(sent), output_split_sizes=others.tolist(), input_split_sizes=lengths.tolist(), group=group
    )
    found: dict[int, Any] = {}
    for part in torch.split(arrived, others.tolist()):
        if len(part):
            found |= torch.load(io.BytesIO(part.numpy().tobytes()), weights_only=False)
    return found


def _packed(batches: dict[int, Any]) -> torch.Tensor:
    # A view would be written with all that it is a view of.
    whole = {
        place: {
            name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        for place, batch in batches.items()
    }
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
