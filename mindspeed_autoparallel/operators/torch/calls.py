"""The calls of a captured program, ready to be made on local pieces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_autoparallel.operators.graph.node import NO_CUT
from mindspeed_autoparallel.operators.search.state import Decisions
from mindspeed_autoparallel.operators.torch.redistribute import MeshGroups

_SHAPES = frozenset(["view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"])
"""What these make is known by its shape: locally, the shape of the piece."""


@dataclass(frozen=True)
class Slot:
    """Stands in a call's arguments for the tensor of this input of its node."""

    number: int


@dataclass(frozen=True)
class CapturedCall:
    """``target(*args, **keywords)``, of whose results item ``index`` is the node's output (None: the only one)."""

    operator: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    index: int | None = None

    def function(self, name: str, decisions: Decisions, mesh: MeshGroups) -> Callable[..., torch.Tensor]:
        """The call on the pieces that ``decisions`` give this rank as inputs of operator ``name``."""
        if self.operator in _SHAPES:
            shape = local_shape(name, decisions)
            return lambda given: given.reshape(shape)
        if self.operator == "expand":
            shape = local_shape(name, decisions)
            return lambda given: given.expand(shape)
        if self.operator in ("embedding", "index", "index_select") and _table_dims(name, decisions):
            return look_up(name, decisions, mesh)
        return self._call

    def _call(self, *given: torch.Tensor) -> Any:
        keywords = _filled(self.keywords, given)
        if "device" in keywords:  # the device of the capture, meta perhaps
            keywords["device"] = given[0].device if given else torch.get_default_device()
        made = self.target(*_filled(self.args, given), **keywords)
        return made if self.index is None else made[self.index]


def _filled(value: Any, given: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(value, Slot):
        return given[value.number]
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, given) for item in value)
    if isinstance(value, dict):
        return {key: _filled(item, given) for key, item in value.items()}
    return value


def local_shape(name: str, decisions: Decisions) -> tuple[int, ...]:
    """Shape of one rank's piece of the output of operator ``name``."""
    shape = list(decisions.graph.nodes[name].output_shape)
    for placement, parts in zip(decisions.output_placements(name), decisions.mesh, strict=True):
        if placement >= 0:
            shape[placement] //= parts
    return tuple(shape)


def _table_dims(name: str, decisions: Decisions) -> list[int]:
    """Mesh dims that cut the table of a look-up."""
    axes = decisions.graph.nodes[name].axes
    return [dim for dim, axis in enumerate(decisions.choices[name]) if axis != NO_CUT and axes[axis].name == "table"]


def look_up(name: str, decisions: Decisions, mesh: MeshGroups) -> Callable[..., torch.Tensor]:
    """Rows of this rank's piece of the table, zero where the row is another rank's: a pending sum."""
    node, dims = decisions.graph.nodes[name], _table_dims(name, decisions)
    part = 0
    for dim in dims:
        part = part * mesh.shape[dim] + mesh.coordinates[dim]
    whole = next(axis.size for axis in node.axes if axis.name == "table")
    rows = whole // math.prod(mesh.shape[dim] for dim in dims)

    def gathered(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        mine = index % whole - part * rows  # counted from the end, perhaps
        here = (mine >= 0) & (mine < rows)
        found = torch.nn.functional.embedding(mine.where(here, 0), weight)
        return found * here.unsqueeze(-1).to(found.dtype)

    return gathered
