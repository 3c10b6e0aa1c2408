"""Whole microbatches given to other replicas by one all-to-all, so that the work of replicas is even."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist

from mindspeed_autoparallel.data.balance import short_at_the_ends
from mindspeed_autoparallel.data.partition import cost_of, lower_bound, partition


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Which microbatches of a global batch a replica trains, and what that gains."""

    places: tuple[tuple[int, ...], ...]
    """By replica, in the order of training: microbatch ``replica * number + index`` of the replica that loaded it."""
    imbalance_before: float
    """Work of the slowest replica over that of the mean one."""
    imbalance: float
    gap: float
    """How far the slowest replica lies above the batch's own lower bound, as a share of it."""


def share(works: Sequence[Sequence[float]]) -> Shared:
    """Return the same answer on every rank for the works ``[replica][microbatch]`` of a global batch.

    Every replica keeps its number of microbatches. A batch that cannot be made more even stays as it is loaded.
    """
    replicas, number = len(works), len(works[0])
    weights = numpy.array(works, dtype=numpy.float64).reshape(-1, 1)
    as_loaded: Any = numpy.repeat(numpy.arange(replicas), number)
    before = cost_of(weights, as_loaded, replicas)
    bins, cost = as_loaded, before
    if replicas > 1:
        found = partition(weights, replicas, number)
        if found.cost < before * (1 - 1e-9):
            bins, cost = found.bins, found.cost
    places = []
    for replica in range(replicas):
        rows = numpy.flatnonzero(bins == replica)
        times = weights[rows, 0]
        # Of equal ones the order stays: nothing is gained by another.
        rows = rows if numpy.ptp(times) == 0 else rows[short_at_the_ends(times)]
        places.append(tuple(int(row) for row in rows))
    mean = float(weights.sum()) / replicas
    bound = lower_bound(weights, replicas, number)
    return Shared(
        places=tuple(places),
        imbalance_before=before / mean if mean else 1.0,
        imbalance=cost / mean if mean else 1.0,
        gap=cost / bound - 1 if bound else 0.0,
    )


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
