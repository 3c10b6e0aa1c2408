"""The redistribution steps of a plan as collectives, differentiable, with the bytes they really sent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import REPLICATE
from mindspeed_autoparallel.operators.graph.redistribution import Placements, Step, gradient_of_output, steps


@dataclass
class MeshGroups:
    """This rank's place in the mesh of ``ranks``; ``sent_bytes`` counts up."""

    ranks: torch.Tensor
    sent_bytes: int = 0
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.ranks.shape)

    @cached_property
    def coordinates(self) -> tuple[int, ...]:
        return tuple(int(c) for c in (self.ranks == dist.get_rank()).nonzero()[0])

    def group(self, dims: tuple[int, ...]) -> Any:
        """The ranks that differ from this one in ``dims`` only. All ranks run the same plan, so each set of dims is
        first asked for by all of them together."""
        if dims not in self._groups:
            rest = [d for d in range(len(self.shape)) if d not in dims]
            lines = self.ranks.permute(*rest, *dims).reshape(-1, math.prod(self.shape[d] for d in dims)).tolist()
            self._groups[dims], _ = dist.new_subgroups_by_enumeration(lines)
        return self._groups[dims]

    def piece(self, whole: torch.Tensor, placements: Placements) -> torch.Tensor:
        """This rank's piece of a ``whole`` tensor."""
        for dim, placement in enumerate(placements):
            if placement >= 0:
                whole = whole.chunk(self.shape[dim], placement)[self.coordinates[dim]]
        return whole.contiguous()


def make_groups(shape: tuple[int, ...]) -> MeshGroups:
    """A mesh over all ranks, last dim fastest; every rank calls it. Raises ``ConfigError`` for another number."""
    if math.prod(shape) != dist.get_world_size():
        raise ConfigError(f"the plan is for {math.prod(shape)} devices and {dist.get_world_size()} processes run.")
    return MeshGroups(torch.arange(math.prod(shape)).reshape(shape))


def groups_of(mesh: DeviceMesh) -> MeshGroups:
    """The groups of a ``DeviceMesh`` over all ranks whose dims are those of the plan."""
    return MeshGroups(mesh.mesh.cpu(), _groups={(dim,): mesh.get_group(dim) for dim in range(mesh.ndim)})


def _take(step: Step, local: torch.Tensor, mesh: MeshGroups) -> torch.Tensor:
    group = mesh.group(step.mesh_dims)
    parts, coordinate = dist.get_world_size(group), mesh.coordinates[step.mesh_dims[0]]
    local = local.contiguous()
    size = local.numel() * local.element_size()
    if step.collective == "slice":
        return local.chunk(parts, step.after)[coordinate].contiguous()
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


def _walk(local: torch.Tensor, source: Placements, target: Placements, mesh: MeshGroups) -> torch.Tensor:
    for step in steps(source, target):
        local = _take(step, local, mesh)
    return local


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, source: Placements, target: Placements, gradient: Placements, mesh: MeshGroups
    ) -> torch.Tensor:
        ctx.source, ctx.gradient, ctx.mesh = source, gradient, mesh
        return (
            _walk(local, source, target, mesh).view_as(local)
            if source == target
            else _walk(local, source, target, mesh)
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _walk(gradient, ctx.gradient, gradient_of_output(ctx.source), ctx.mesh), None, None, None, None


def redistribute(
    local: torch.Tensor, source: Placements, target: Placements, gradient: Placements, mesh: MeshGroups
) -> torch.Tensor:
    """Take a local piece from ``source`` to ``target``; backward takes its gradient from ``gradient`` placements."""
    result: torch.Tensor = _Redistribute.apply(local, source, target, gradient, mesh)
    return result


def whole(local: torch.Tensor, placements: Placements, mesh: MeshGroups) -> torch.Tensor:
    """The full tensor on every rank; its gradient is the same on every rank."""
    everywhere = (REPLICATE,) * len(placements)
    return redistribute(local, placements, everywhere, everywhere, mesh)
