"""Where each rank sits in a module's layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """One rank's place in one module's layout."""

    tensor: int
    context: int
    data: int
    pipeline: int


Placement = tuple[Coordinates, ...]


def sized_placement(
    world_size: int, tensor: int, context: int, pipeline: int, *, pipeline_before_data: bool = False
) -> Placement:
    """Return the places that Megatron's order of dimensions gives: tensor ranks are neighbours, then come context, data
    and pipeline; ``pipeline_before_data``: ``--use-tp-pp-dp-mapping``."""
    inner = tensor * context
    data = world_size // (inner * pipeline)

    def place(rank: int) -> Coordinates:
        outer = rank // inner
        replica, stage = outer % data, outer // data
        if pipeline_before_data:
            replica, stage = outer // pipeline, outer % pipeline
        return Coordinates(rank % tensor, rank // tensor % context, replica, stage)

    return tuple(place(rank) for rank in range(world_size))


def num_stages(placement: Placement) -> int:
    """Return the pipeline size of a placement."""
    return 1 + max(place.pipeline for place in placement)


def num_replicas(placement: Placement) -> int:
    """Return the data-parallel size of a placement."""
    return 1 + max(place.data for place in placement)


def replica_ranks(placement: Placement, data: int, pipeline: int | None = None) -> list[int]:
    """Return ranks of one data-parallel replica, of one pipeline stage if given, in rank order."""
    return [
        rank for rank, at in enumerate(placement) if at.data == data and (pipeline is None or at.pipeline == pipeline)
    ]


def by_replica(placement: Placement, pipeline: int | None = None) -> dict[int, list[int]]:
    """Return ``replica_ranks`` of every replica, in one walk over the ranks."""
    found: dict[int, list[int]] = {}
    for rank, at in enumerate(placement):
        if pipeline is None or at.pipeline == pipeline:
            found.setdefault(at.data, []).append(rank)
    return found


def closed_sets(placements: Sequence[Placement]) -> list[list[int]]:
    """Return the smallest sets of ranks that hold whole replicas of every placement; local exchange stays inside
    one."""
    parent = list(range(len(placements[0])))

    def root(rank: int) -> int:
        while parent[rank] != rank:
            rank = parent[rank]
        return rank

    for placement in placements:
        first: dict[int, int] = {}
        for rank, at in enumerate(placement):
            parent[root(rank)] = root(first.setdefault(at.data, rank))
    sets: dict[int, list[int]] = {}
    for rank in range(len(parent)):
        sets.setdefault(root(rank), []).append(rank)
    return sorted(sets.values())
