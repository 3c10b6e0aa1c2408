"""The calls of a captured program, in a form that runs on local pieces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_autoparallel.operators.graph.node import NO_CUT
from mindspeed_autoparallel.operators.search.state import Decisions
from mindspeed_autoparallel.operators.torch.redistribute import MeshGroups
from mindspeed_autoparallel.operators.torch.rules.products import GROUPS_ARGUMENT
from mindspeed_autoparallel.operators.torch.rules.table import NO_GRADIENT

SHAPES = frozenset(["view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"])
"""Operators that only change the shape: locally, to that of the piece."""
_DROPOUTS = frozenset(["dropout", "native_dropout"])
_DRAWS = frozenset(["bernoulli", "rand_like", "randn_like"])
_RECURRENT = frozenset(["gru", "lstm", "rnn_tanh", "rnn_relu"])
DRAWN_WHOLE = _DROPOUTS | _DRAWS | {"scaled_dot_product_attention"}
"""Random operators whose pieces equal the pieces of one process's draw."""
_LOOK_UPS = frozenset(["embedding", "index", "index_select"])

Local = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Slot:
    """Placeholder in a call's arguments for the tensor of this input of its node."""

    number: int


@dataclass(frozen=True)
class CapturedCall:
    """Call ``target(*args, **keywords)``; item ``index`` of its results is the node's output (None: the only one).

    ``layout``: shape and strides of the whole first input; random numbers are drawn in its memory order.
    """

    operator: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: dict[str, object]
    index: int | None = None
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def function(self, name: str, decisions: Decisions, mesh: MeshGroups) -> Local:
        """Return the function that makes the call on this rank's pieces of the inputs of operator ``name``."""
        if self.operator in SHAPES:
            shape = local_shape(name, decisions)
            return lambda given: given.reshape(shape)
        if self.operator in ("expand", "broadcast_to"):
            shape = local_shape(name, decisions)
            return lambda given: given.expand(shape)
        if self.operator == "stop_gradient":
            return lambda given: given.detach()
        if self.operator in _LOOK_UPS and axis_dims(name, decisions, "table"):
            return look_up(name, decisions, mesh, self._padding())
        if self.operator in _DROPOUTS and self._is_random():
            return self._dropped(decisions.output_placements(name), mesh)
        if self.operator in _DRAWS and not self._draws_by_values():
            return self._drawn(decisions.output_placements(name), mesh)
        if self.operator == "scaled_dot_product_attention" and self._is_random():
            return self._attention_dropped(name, decisions, mesh)
        groups = axis_dims(name, decisions, "groups")
        if groups:
            return self._with_groups(math.prod(mesh.shape[dim] for dim in groups))
        return self.run

    def run(self, *given: torch.Tensor) -> Any:
        """Make the captured call on ``given``, on their device."""
        if self.operator == "copy":  # aten.copy has no derivative
            return given[-1].to(given[0].dtype).expand(given[0].shape)
        keywords = _filled(self.keywords, given)
        if "device" in keywords:  # the device of the capture, which may be meta
            keywords["device"] = given[0].device if given else torch.get_default_device()
        if self.operator in NO_GRADIENT:  # some of these have no derivative and raise
            given = tuple(value.detach() for value in given)
        if given and self._draws_as_laid_out(given[0]):
            given = (self._ones(given[0]).copy_(given[0]), *given[1:])
        made = self.target(*_filled(self.args, given), **keywords)
        return made if self.index is None else made[self.index]

    def _draws_as_laid_out(self, first: torch.Tensor) -> bool:
        """Return whether the call draws in memory order, and ``first`` has another layout than when captured."""
        if self.layout is None or self.layout[0] != tuple(first.shape) or self.layout[1] == first.stride():
            return False
        return torch.Tag.nondeterministic_seeded in getattr(self.target, "tags", ())

    def _argument(self, position: int, name: str, default: Any) -> Any:
        return self.args[position] if len(self.args) > position else self.keywords.get(name, default)

    def _padding(self) -> int:
        return int(self._argument(2, "padding_idx", -1)) if self.operator == "embedding" else -1

    @property
    def is_random(self) -> bool:
        if self.operator in _DROPOUTS or self.operator == "scaled_dot_product_attention":
            return self._is_random()
        return draws(self.target, self.operator, self.args)

    def _is_random(self) -> bool:
        if self.operator == "scaled_dot_product_attention":
            return bool(self._argument(4, "dropout_p", 0.0) > 0)
        return bool(self._argument(1, "p", 0.5) > 0 and self._argument(2, "train", True))

    def _draws_by_values(self) -> bool:
        """Return whether the input's values are the probabilities: then the call needs the whole input."""
        return self.operator == "bernoulli" and self._argument(1, "p", None) is None

    def _ones(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of ones with the layout of the whole first input: numbers are drawn in memory order."""
        assert self.layout is not None, self.operator
        return torch.empty_strided(*self.layout, dtype=like.dtype, device=like.device).fill_(1)

    def _dropped(self, placements: tuple[int, ...], mesh: MeshGroups) -> Local:
        probability = self._argument(1, "p", 0.5)

        def dropped(given: torch.Tensor) -> torch.Tensor:
            kept = torch.nn.functional.dropout(self._ones(given), probability, True)
            piece = mesh.piece(kept, placements)
            return piece.bool() if self.index == 1 else given * piece

        return dropped

    def _drawn(self, placements: tuple[int, ...], mesh: MeshGroups) -> Local:
        def drawn(given: torch.Tensor) -> torch.Tensor:
            return mesh.piece(self.run(self._ones(given)), placements)

        return drawn

    def _attention_dropped(self, name: str, decisions: Decisions, mesh: MeshGroups) -> Local:
        """Return attention as single operators, with this rank's piece of the whole dropout mask."""
        nodes = decisions.graph.nodes
        q, k = (nodes[source].output_shape for source in nodes[name].inputs[:2])
        placements = decisions.output_placements(name)  # never of sequence or head dims
        probability = self._argument(4, "dropout_p", 0.0)
        causal = bool(self._argument(5, "is_causal", False))
        scale = self.keywords.get("scale") or q[-1] ** -0.5

        def attend(*given: torch.Tensor) -> torch.Tensor:
            query, key, value = given[:3]
            if key.shape[-3] != query.shape[-3]:
                times = query.shape[-3] // key.shape[-3]
                key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
            scores = query @ key.transpose(-1, -2) * scale
            if causal:
                hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
                scores = scores.masked_fill(hidden, float("-inf"))
            if len(given) > 3:
                mask = given[3]
                scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
            ones = torch.ones((*q[:-1], k[-2]), dtype=query.dtype, device=query.device)
            kept = mesh.piece(torch.nn.functional.dropout(ones, probability, True), placements)
            return (torch.softmax(scores, -1) * kept) @ value

        return attend

    def _with_groups(self, parts: int) -> Local:
        """Return the call with the number of groups that a piece has."""
        position, args = GROUPS_ARGUMENT[self.operator], list(self.args)
        args[position] = int(args[position]) // parts
        fewer = CapturedCall(self.operator, self.target, tuple(args), self.keywords, self.index)
        return fewer.run


def draws(target: Any, operator: str, args: tuple[Any, ...]) -> bool:
    """Return whether a call other than dropout draws numbers; recurrent layers draw in dropout between layers."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    return operator not in _RECURRENT or bool(args[5] > 0 and args[6])


def _filled(value: Any, given: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(value, Slot):
        return given[value.number]
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, given) for item in value)
    if isinstance(value, dict):
        return {key: _filled(item, given) for key, item in value.items()}
    return value


def local_shape(name: str, decisions: Decisions) -> tuple[int, ...]:
    """Return the shape of one rank's piece of the output of operator ``name``."""
    shape = list(decisions.graph.nodes[name].output_shape)
    for placement, parts in zip(decisions.output_placements(name), decisions.mesh, strict=True):
        if placement >= 0:
            shape[placement] //= parts
    return tuple(shape)


def axis_dims(name: str, decisions: Decisions, axis_name: str) -> list[int]:
    """List the mesh dims that cut the axis ``axis_name`` of operator ``name``."""
    axes = decisions.graph.nodes[name].axes
    return [dim for dim, axis in enumerate(decisions.choices[name]) if axis != NO_CUT and axes[axis].name == axis_name]


def look_up(name: str, decisions: Decisions, mesh: MeshGroups, padding: int = -1) -> Local:
    """Return the look-up in this rank's piece of the table; rows of other ranks are zero, which leaves a pending sum.

    Row ``padding`` of the whole table gets no gradient; -1: no such row.
    """
    node = decisions.graph.nodes[name]
    parts, part = mesh.place(tuple(axis_dims(name, decisions, "table")))
    whole = next(axis.size for axis in node.axes if axis.name == "table")
    rows = whole // parts
    own_padding = padding - part * rows if padding >= 0 and 0 <= padding - part * rows < rows else None

    def gathered(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        mine = index % whole - part * rows  # indices may count from the end
        here = (mine >= 0) & (mine < rows)
        found = torch.nn.functional.embedding(mine.where(here, 0), weight, padding_idx=own_padding)
        return found * here.unsqueeze(-1).to(found.dtype)

    return gathered
