"""Which replica computes which item, and which rows travel from which rank to which rank.

An item is one image or audio clip of one sample. ``deliver`` serves both directions: a rank receives each row that it
needs from one holder: from itself if it holds the row, otherwise from the holder that has sent the fewest rows.
Forward, the ranks of the encoder replica that owns an item hold its output; the first-stage ranks of the backbone
replica that has the sample need it, each the rows of its shard of the sequence. Backward, every rank of the owner needs
the gradient of every shard, from one of the ranks that keep the shard, and sums the shards in rank order. In an encoder
with a pipeline, the first stage receives the inputs and the last stage has the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.runtime.hetero.redistribution.placement import (
    Item,
    Placement,
    Rows,
    by_replica,
    num_replicas,
    num_stages,
    replica_ranks,
    shards_of,
)


def longest_first(costs: Sequence[float], num_owners: int) -> list[int]:
    """Return the owner of each item: the costliest item first, to the owner with the least load.

    Loads differ by at most the largest cost; ties go to the lower index.
    """
    loads = [0.0] * num_owners
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(num_owners), key=lambda o: (loads[o], o))
        owners[item] = owner
        loads[owner] += costs[item]
    return owners


def contiguous(num_items: int, num_owners: int) -> list[int]:
    """Return the owner of each item: equal runs in item order, the first ``num_items % num_owners`` one longer."""
    size, extra = divmod(num_items, num_owners)
    return [owner for owner in range(num_owners) for _ in range(size + (1 if owner < extra else 0))]


def imbalance(costs: Sequence[float], owners: Sequence[int], num_owners: int) -> float:
    """Return the largest load over the mean load; 1.0 when there is no work."""
    loads = [0.0] * num_owners
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    total = sum(loads)
    return max(loads) * num_owners / total if total else 1.0


@dataclass(frozen=True, order=True)
class Piece:
    """Rows ``[start, stop)`` of one item to send from rank ``source`` to rank ``target`` (equal: nothing is sent)."""

    source: int
    target: int
    item: int
    start: int
    stop: int


def deliver(needs: Iterable[tuple[int, int, Rows]], holders: Mapping[int, Sequence[int]]) -> tuple[Piece, ...]:
    """Return pieces for ``needs`` (target rank, item, rows), each from one of the ranks in ``holders[item]``.

    Empty row ranges give no piece. A target that holds no copy receives from the holder that has sent the fewest rows.
    """
    sent: dict[int, int] = {}
    pieces = []
    for target, item, (start, stop) in sorted(needs):
        if start >= stop:
            continue
        source = target
        if target not in holders[item]:
            source = min(holders[item], key=lambda rank: (sent.get(rank, 0), rank))
            sent[source] = sent.get(source, 0) + stop - start
        pieces.append(Piece(source, target, item, start, stop))
    return tuple(sorted(pieces))


def assign(
    items: Sequence[Item], encoder: Placement, backbone: Placement, ranks: Sequence[int], mode: str
) -> list[int]:
    """Return the encoder replica of each item, among the replicas inside ``ranks``.

    ``off`` assigns contiguous runs of items in their order; ``local`` and ``global`` assign the costliest items first
    and differ only in ``ranks`` and ``items``, which the caller passes.
    """
    replicas = sorted({encoder[rank].data for rank in ranks})
    if mode == "off":
        return [replicas[o] for o in _dp_replica_runs(items, encoder, backbone, replicas)]
    return [replicas[o] for o in longest_first([item.cost for item in items], len(replicas))]


def _dp_replica_runs(items: Sequence[Item], encoder: Placement, backbone: Placement, replicas: list[int]) -> list[int]:
    """Return the owner of each item in contiguous runs over the encoder replicas inside the item's backbone replica.

    If a backbone replica with items contains no encoder replica, the runs of all items go over all ``replicas``.
    """
    owners = [0] * len(items)
    for replica in sorted({item.dp_replica for item in items}):
        ranks = set(replica_ranks(backbone, replica))
        near = [o for o, replica in enumerate(replicas) if set(replica_ranks(encoder, replica)) <= ranks]
        mine = [i for i, item in enumerate(items) if item.dp_replica == replica]
        if not near:
            return contiguous(len(items), len(replicas))
        for i, run in zip(mine, contiguous(len(mine), len(near)), strict=True):
            owners[i] = near[run]
    return owners


@dataclass(frozen=True)
class RedistributionPlan:
    """Owners and pieces of one macro-batch: inputs, outputs and gradients. The same on every rank."""

    items: tuple[Item, ...]
    owners: tuple[int, ...]
    inputs: tuple[Piece, ...]
    outputs: tuple[Piece, ...]
    gradients: tuple[Piece, ...]

    def owned_by(self, replica: int) -> list[int]:
        """Return indices of the items that an encoder replica computes, in item order."""
        return [i for i, owner in enumerate(self.owners) if owner == replica]


@dataclass(frozen=True, kw_only=True)
class MeetingStages:
    """The stages whose ranks exchange."""

    backbone: int
    """Stage that receives the outputs and sends the gradients."""
    takes: int
    """Stage of the encoder's or generator's own pipeline that receives the inputs."""
    gives: int
    """Stage of that pipeline that has the outputs."""


def make_plan(
    items: Sequence[Item],
    *,
    encoder: Placement,
    backbone: Placement,
    ranks: Sequence[int],
    mode: str,
    sequence_parallel: bool = False,
    batch_owner_ranks: Mapping[int, Sequence[int]] | None = None,
    stages: MeetingStages | None = None,
) -> RedistributionPlan:
    """Return the plan for ``items`` over ``ranks`` (a closed set of ranks, or the world).

    ``batch_owner_ranks``: for each replica, the ranks that hold its batches; all ranks of the replica by default.
    ``sequence_parallel``: of the backbone; a row then goes only to the rank that keeps its token, if its position is
    known.
    ``stages``: the exchanging stages; those of an encoder by default. A generator receives the decoder's rows on the
    path of an encoder's "gradients" and sends their gradients on the path of its "outputs".
    """
    owners = assign(items, encoder, backbone, ranks, mode)
    at = stages or MeetingStages(backbone=0, takes=0, gives=num_stages(encoder) - 1)
    takers_of, members_of = by_replica(encoder, pipeline=at.takes), by_replica(encoder, pipeline=at.gives)
    readers = {**by_replica(backbone), **{replica: held for replica, held in (batch_owner_ranks or {}).items() if held}}
    on_stage = by_replica(backbone, pipeline=at.backbone)
    members = [members_of[owner] for owner in owners]
    inputs = deliver(
        [(rank, i, (0, item.input_rows)) for i, item in enumerate(items) for rank in takers_of[owners[i]]],
        {i: readers[item.dp_replica] for i, item in enumerate(items)},
    )
    shards = [shards_of(item, on_stage[item.dp_replica], backbone, sequence_parallel) for item in items]
    needs = [
        (rank, i, rows) for i, parts in enumerate(shards) for part in parts for rank in part.ranks for rows in part.rows
    ]
    outputs = deliver(needs, dict(enumerate(members)))
    gradients: list[Piece] = []
    for number in range(max(map(len, shards), default=0)):
        held = {i: parts[number] for i, parts in enumerate(shards) if number < len(parts)}
        wanted = [(rank, i, rows) for i, part in held.items() for rows in part.rows for rank in members[i]]
        gradients += deliver(wanted, {i: part.ranks for i, part in held.items()})
    return RedistributionPlan(tuple(items), tuple(owners), inputs, outputs, tuple(sorted(gradients)))


def replicas_nested(encoder: Placement, backbone: Placement) -> bool:
    """Return whether every encoder replica is inside one backbone replica: then no input is sent."""
    return all(
        len({backbone[rank].data for rank in replica_ranks(encoder, replica)}) == 1
        for replica in range(num_replicas(encoder))
    )
