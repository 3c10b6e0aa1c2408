"""Steps that take a tensor from one placement to another, and the bytes each step moves; shared by search and executor.

Placements are one per mesh dim (see ``node``). The steps are those of least bytes (see ``shortest``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_autoparallel.operators.graph.node import PARTIAL, REPLICATE
from mindspeed_autoparallel.operators.graph.shortest import shortest_moves

Placements = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One collective (or slice) over ``mesh_dims``, outermost first, with their placement before and after."""

    mesh_dims: tuple[int, ...]
    before: int
    after: int

    @property
    def collective(self) -> str:
        """Return its name: ``slice``, ``all_gather``, ``all_to_all``, ``all_reduce`` or ``reduce_scatter``."""
        if self.before == REPLICATE:
            return "slice"
        if self.before == PARTIAL:
            return "all_reduce" if self.after == REPLICATE else "reduce_scatter"
        return "all_gather" if self.after == REPLICATE else "all_to_all"


def gradient_of_output(placements: Placements) -> Placements:
    """Return the placement that a producer expects for its output's gradient: the output's, whole for a pending sum."""
    return tuple(REPLICATE if p == PARTIAL else p for p in placements)


def steps(source: Placements, target: Placements, shape: Sequence[int], mesh: Sequence[int]) -> list[Step]:
    """Return the steps of least bytes from ``source`` to ``target`` of a tensor of ``shape`` on ``mesh``.

    Raises ``AssertionError`` for a target with a pending sum.
    """
    return [Step(*move) for move in shortest_moves(source, target, tuple(shape), tuple(mesh))]


def local_bytes(total_bytes: int, placements: Sequence[int], mesh: Sequence[int]) -> int:
    """Return the bytes of one device's piece of a tensor of ``total_bytes``."""
    return total_bytes // math.prod(n for n, p in zip(mesh, placements, strict=True) if p >= 0)


def step_costs(
    source: Placements, target: Placements, shape: Sequence[int], item_bytes: int, mesh: Sequence[int]
) -> Iterator[tuple[Step, int]]:
    """Yield each step with the bytes one device sends in it (ring algorithms; a slice sends none)."""
    current = list(source)
    total_bytes = math.prod(shape) * item_bytes
    for step in steps(source, target, shape, mesh):
        parts = math.prod(mesh[d] for d in step.mesh_dims)
        local = local_bytes(total_bytes, current, mesh)
        moved = {
            "slice": 0,
            "all_gather": (parts - 1) * local,
            "all_to_all": (parts - 1) * local // parts,
            "reduce_scatter": (parts - 1) * local // parts,
            "all_reduce": 2 * (parts - 1) * local // parts,
        }[step.collective]
        for d in step.mesh_dims:
            current[d] = step.after
        yield step, moved


@lru_cache(maxsize=1 << 18)
def moved_bytes(
    source: Placements, target: Placements, shape: tuple[int, ...], item_bytes: int, mesh: tuple[int, ...]
) -> int:
    """Return the bytes one device sends to take a tensor of ``shape`` from ``source`` to ``target`` on ``mesh``."""
    return sum(moved for _, moved in step_costs(source, target, shape, item_bytes, mesh))
