"""Which rows travel from which rank to which rank.

An item is one image or audio clip of one sample. ``deliver`` serves both directions: everyone who needs rows gets each
of them from exactly one holder, itself first, otherwise the holders take turns. Forward, the holders of an item are the
members of the encoder replica that owns it, and the needers are the first-stage ranks of the backbone replica whose
sample it is (each the rows its sequence shard needs). Backward, the backbone's partial gradients are delivered to every
member of the owner: one tensor-parallel replica of each context rank, summed in rank order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.runtime.hetero.redistribution.balance import contiguous, longest_first
from mindspeed_autoparallel.runtime.hetero.redistribution.placement import Placement, num_replicas, replica_ranks


@dataclass(frozen=True)
class Item:
    """One image or audio clip: what the plan must know of it, the same on every rank."""

    home: int
    """Data-parallel replica of the backbone whose microbatch holds the sample."""
    microbatch: int
    sample: int
    input_rows: int
    output_rows: int
    cost: float
    meta: tuple[int, ...] = ()
    """Small integers the encoder needs beside the rows, e.g. (frames, height, width) in patches."""


@dataclass(frozen=True, order=True)
class Piece:
    """Rows ``[start, stop)`` of one item on their way from ``source`` to ``target`` (equal when nothing travels)."""

    source: int
    target: int
    item: int
    start: int
    stop: int


Rows = tuple[int, int]


def deliver(needs: Iterable[tuple[int, int, Rows]], holders: Mapping[int, Sequence[int]]) -> tuple[Piece, ...]:
    """Pieces for ``needs`` (target rank, item, rows), each from one of the ranks in ``holders[item]``.

    Empty row ranges give no piece. Sources are spread: among the holders the one that has sent the fewest rows so far.
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
    """Encoder replica of each item, among the replicas that lie in ``ranks``.

    ``off`` keeps the order of (home, microbatch, sample) in contiguous runs; ``local`` and ``global`` put the longest
    first; they differ in the set of ranks (and so of items) that the caller hands in.
    """
    replicas = sorted({encoder[rank].data for rank in ranks})
    if mode == "off":
        return [replicas[o] for o in _home_runs(items, encoder, backbone, replicas)]
    return [replicas[o] for o in longest_first([item.cost for item in items], len(replicas))]


def _home_runs(items: Sequence[Item], encoder: Placement, backbone: Placement, replicas: list[int]) -> list[int]:
    """Contiguous runs, inside the encoder replicas that lie in the item's own backbone replica where there are such."""
    owners = [0] * len(items)
    for home in sorted({item.home for item in items}):
        ranks = set(replica_ranks(backbone, home))
        near = [o for o, replica in enumerate(replicas) if set(replica_ranks(encoder, replica)) <= ranks]
        mine = [i for i, item in enumerate(items) if item.home == home]
        if not near:
            return contiguous(len(items), len(replicas))
        for i, run in zip(mine, contiguous(len(mine), len(near)), strict=True):
            owners[i] = near[run]
    return owners


@dataclass(frozen=True)
class RedistributionPlan:
    """All that one macro-batch needs: owners, and the pieces of inputs, outputs and gradients. Same on every rank."""

    items: tuple[Item, ...]
    owners: tuple[int, ...]
    inputs: tuple[Piece, ...]
    outputs: tuple[Piece, ...]
    gradients: tuple[Piece, ...]

    def owned_by(self, replica: int) -> list[int]:
        """Indices of the items that an encoder replica computes, in item order."""
        return [i for i, owner in enumerate(self.owners) if owner == replica]


def first_stage_needs(items: Sequence[Item], backbone: Placement) -> list[tuple[int, int, Rows]]:
    """Every first-stage rank of an item's home needs all its rows."""
    return [
        (rank, i, (0, item.output_rows))
        for i, item in enumerate(items)
        for rank in replica_ranks(backbone, item.home, 0)
    ]


def make_plan(
    items: Sequence[Item],
    *,
    encoder: Placement,
    backbone: Placement,
    ranks: Sequence[int],
    mode: str,
    input_holders: Mapping[int, Sequence[int]] | None = None,
    sharded_needs: Sequence[tuple[int, int, Rows]] | None = None,
) -> RedistributionPlan:
    """The plan for ``items`` over ``ranks`` (a closed set of ranks, or the world).

    ``input_holders``: for each home replica, the ranks that hold its batches; all ranks of the replica by default.
    ``sharded_needs``: rows each first-stage rank needs under a sequence-sharded merge, disjoint over tensor and context
    ranks; by default every first-stage rank needs whole items.
    """
    owners = assign(items, encoder, backbone, ranks, mode)
    members = [replica_ranks(encoder, owner) for owner in owners]
    held = [(input_holders or {}).get(item.home) or replica_ranks(backbone, item.home) for item in items]
    inputs = deliver(
        [(rank, i, (0, item.input_rows)) for i, item in enumerate(items) for rank in members[i]], dict(enumerate(held))
    )
    needs = first_stage_needs(items, backbone) if sharded_needs is None else list(sharded_needs)
    outputs = deliver(needs, dict(enumerate(members)))
    gradients: list[Piece] = []
    if sharded_needs is not None:
        for source, i, (start, stop) in needs:
            gradients += [Piece(source, target, i, start, stop) for target in members[i] if start < stop]
    else:
        for context in sorted({at.context for at in backbone}):
            partial = {
                i: [r for r in replica_ranks(backbone, item.home, 0) if backbone[r].context == context]
                for i, item in enumerate(items)
            }
            wanted = [(rank, i, (0, item.output_rows)) for i, item in enumerate(items) for rank in members[i]]
            gradients += deliver(wanted, partial)
    return RedistributionPlan(tuple(items), tuple(owners), inputs, outputs, tuple(sorted(gradients)))


def replicas_nested(encoder: Placement, backbone: Placement) -> bool:
    """Whether every encoder replica lies inside one backbone replica: then no input has to move."""
    return all(
        len({backbone[rank].data for rank in replica_ranks(encoder, replica)}) == 1
        for replica in range(num_replicas(encoder))
    )
