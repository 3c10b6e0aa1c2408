"""The redistribution steps of a plan as differentiable collectives, with a count of the bytes sent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.redistribution import Placements, Step, gradient_of_output, steps

Shape = tuple[int, ...]


@dataclass
class MeshGroups:
    """The mesh of ``ranks`` with its process groups; ``sent_bytes`` counts what this rank has sent."""

    ranks: torch.Tensor
    sent_bytes: int = 0
    bytes_beyond_plan: int = 0
    """The part of ``sent_bytes`` for inputs, outputs and changed buffers in forward, which are no edges of the plan."""
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.ranks.shape)

    @cached_property
    def coordinates(self) -> tuple[int, ...]:
        return tuple(int(c) for c in (self.ranks == dist.get_rank()).nonzero()[0])

    def group(self, dims: tuple[int, ...]) -> Any:
        """Return the group of the ranks that differ from this one in ``dims`` only.

        Creating a group is collective. All ranks run the same plan, so they request new groups in the same order.
        """
        if dims not in self._groups:
            rest = [d for d in range(len(self.shape)) if d not in dims]
            lines = self.ranks.permute(*rest, *dims).reshape(-1, math.prod(self.shape[d] for d in dims)).tolist()
            if any(line != sorted(line) for line in lines):
                raise ConfigError(
                    f"the ranks {lines[0]} of one line of the mesh are not in ascending order: sort them."
                )
            self._groups[dims], _ = dist.new_subgroups_by_enumeration(lines)
        return self._groups[dims]

    def place(self, dims: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of ranks along ``dims``, and this rank's index among them, outermost dim first."""
        coordinate = 0
        for dim in dims:
            coordinate = coordinate * self.shape[dim] + self.coordinates[dim]
        return math.prod(self.shape[dim] for dim in dims), coordinate

    def piece(self, whole: torch.Tensor, placements: Placements) -> torch.Tensor:
        """Return this rank's piece of a ``whole`` tensor, contiguous."""
        for dim, placement in enumerate(placements):
            if placement >= 0:
                whole = whole.chunk(self.shape[dim], placement)[self.coordinates[dim]]
        return whole.contiguous()


def groups_of(mesh: DeviceMesh) -> MeshGroups:
    """Return the groups of a ``DeviceMesh`` over all ranks, whose dims are those of the plan."""
    return MeshGroups(mesh.mesh.cpu(), _groups={(dim,): mesh.get_group(dim) for dim in range(mesh.ndim)})


def _take(step: Step, local: torch.Tensor, mesh: MeshGroups) -> torch.Tensor:
    parts, coordinate = mesh.place(step.mesh_dims)
    local = local.contiguous()
    size = local.numel() * local.element_size()
    if step.collective == "slice":
        return local.chunk(parts, step.after)[coordinate].contiguous()
    group = mesh.group(step.mesh_dims)
    if step.collective == "all_gather":
        gathered = [torch.empty_like(local) for _ in range(parts)]
        dist.all_gather(gathered, local, group=group)
        mesh.sent_bytes += (parts - 1) * size
        return torch.cat(gathered, step.before)
    if step.collective == "all_reduce":
        result = local.clone()
        dist.all_reduce(result, group=group)
        mesh.sent_bytes += 2 * (parts - 1) * size // parts
        return result
    stacked = torch.stack(local.chunk(parts, step.after))
    mesh.sent_bytes += (parts - 1) * size // parts
    if step.collective == "reduce_scatter":
        piece = torch.empty_like(stacked[0])
        dist.reduce_scatter_tensor(piece.view(-1), stacked.view(-1), group=group)
        return piece
    received = torch.empty_like(stacked)
    dist.all_to_all_single(received, stacked, group=group)
    return torch.cat(list(received), step.before)


def _walk(local: torch.Tensor, source: Placements, target: Placements, shape: Shape, mesh: MeshGroups) -> torch.Tensor:
    for step in steps(source, target, shape, mesh.shape):
        local = _take(step, local, mesh)
    return local


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, move: _Move, mesh: MeshGroups) -> torch.Tensor:
        ctx.move, ctx.mesh = move, mesh
        made = _walk(local, move.source, move.target, move.shape, mesh)
        return made.view_as(local) if move.source == move.target else made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        move: _Move = ctx.move
        if move.gradient is None:
            raise AssertionError("a gradient arrived where the plan has none")
        home = gradient_of_output(move.source)
        return _walk(gradient, move.gradient, home, move.shape, ctx.mesh), None, None


@dataclass(frozen=True)
class _Move:
    """One redistribution, forward and backward; ``gradient``: the placement in which the reader leaves it, or None."""

    source: Placements
    target: Placements
    gradient: Placements | None
    shape: Shape


def redistribute(
    local: torch.Tensor,
    source: Placements,
    wanted: tuple[Placements, Placements | None],
    shape: Shape,
    mesh: MeshGroups,
) -> torch.Tensor:
    """Return a local piece of a tensor of ``shape``, taken from placement ``source`` to the first of ``wanted``.

    Backward takes the gradient from the second of ``wanted`` to the placement that ``source`` implies.
    """
    result: torch.Tensor = _Redistribute.apply(local, _Move(source, *wanted, shape), mesh)
    return result
