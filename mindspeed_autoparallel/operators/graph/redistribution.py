"""Steps that take a tensor from one placement to another, and the bytes each step moves; shared by search and executor.

Placements are one per mesh dim (see ``node``). Mesh dims cut a tensor dim from the first to the last, so an inner cut
of the same tensor dim has to be lifted before an outer one may change; the steps below respect that, which keeps the
prediction and the execution the same thing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.operators.graph.node import PARTIAL, REPLICATE

Placements = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One collective (or local slice) on a mesh dim; ``before`` and ``after`` are its placements.

    Only an all-reduce runs over several mesh dims at once.
    """

    mesh_dims: tuple[int, ...]
    before: int
    after: int

    @property
    def collective(self) -> str:
        """``slice``, ``all_gather``, ``all_to_all``, ``all_reduce`` or ``reduce_scatter``."""
        if self.before == REPLICATE:
            return "slice"
        if self.before == PARTIAL:
            return "all_reduce" if self.after == REPLICATE else "reduce_scatter"
        return "all_gather" if self.after == REPLICATE else "all_to_all"


def gradient_of_output(placements: Placements) -> Placements:
    """Placement a producer expects of its output's gradient: that of the output, and whole for a pending sum."""
    return tuple(REPLICATE if p == PARTIAL else p for p in placements)


def steps(source: Placements, target: Placements) -> list[Step]:
    """Steps from ``source`` to ``target``; a target never holds a pending sum (``AssertionError``).

    What shrinks the tensor comes first, what grows it next, so that little is sent: pending sums are scattered where no
    other mesh dim is concerned, cuts are lifted from the inner to the outer mesh dim, then new ones are made from the
    outer to the inner one. The other pending sums are reduced at once, before anything is gathered.
    """
    if source == target:
        return []
    assert PARTIAL not in target, "operators read whole or cut tensors, never a pending sum"
    size = len(source)
    touched = [source[d] != target[d] for d in range(size)]
    for outer in range(size):
        moved = {source[outer], target[outer]} - {REPLICATE, PARTIAL} if touched[outer] else set()
        for inner in range(outer + 1, size):
            if source[inner] in moved or target[inner] in moved:
                touched[inner] = True

    def alone(d: int) -> bool:
        mine = {source[d], target[d]} - {REPLICATE, PARTIAL}
        return not any(o != d and ({source[o], target[o]} & mine) for o in range(size))

    summed = tuple(d for d in range(size) if source[d] == PARTIAL and target[d] == REPLICATE)
    reduce = [Step(summed, PARTIAL, REPLICATE)] if summed else []
    scatter: list[Step] = []
    lift: list[Step] = []
    lower: list[Step] = []
    for d in range(size):
        if not touched[d] or d in summed:
            continue
        before, after = source[d], target[d]
        if before == PARTIAL:
            (scatter if alone(d) else lower).append(Step((d,), before, after))
        elif before == REPLICATE:
            lower.append(Step((d,), before, after))
        elif alone(d):
            lift.insert(0, Step((d,), before, after))
        else:
            lift.insert(0, Step((d,), before, REPLICATE))
            if after != REPLICATE:
                lower.append(Step((d,), REPLICATE, after))
    return [*scatter, *reduce, *lift, *lower] if lift else [*scatter, *lower, *reduce]


def local_bytes(total_bytes: int, placements: Sequence[int], mesh: Sequence[int]) -> int:
    """Bytes of one device's piece of a tensor of ``total_bytes``."""
    return total_bytes // math.prod(n for n, p in zip(mesh, placements, strict=True) if p >= 0)


def step_costs(
    source: Placements, target: Placements, total_bytes: int, mesh: Sequence[int]
) -> Iterator[tuple[Step, int]]:
    """Each step with the bytes one device sends in it (ring algorithms; a slice sends none)."""
    current = list(source)
    for step in steps(source, target):
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


def moved_bytes(source: Placements, target: Placements, total_bytes: int, mesh: Sequence[int]) -> int:
    """Bytes one device sends to take a tensor of ``total_bytes`` from ``source`` to ``target`` on ``mesh``."""
    return sum(moved for _, moved in step_costs(source, target, total_bytes, mesh))
