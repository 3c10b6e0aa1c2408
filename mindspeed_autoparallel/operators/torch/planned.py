"""A captured module that runs by a plan: every rank has local pieces, and every edge is redistributed as planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import REPLICATE
from mindspeed_autoparallel.operators.graph.redistribution import Placements
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.state import Decisions
from mindspeed_autoparallel.operators.torch.capture import Captured
from mindspeed_autoparallel.operators.torch.redistribute import MeshGroups, redistribute

Function = Callable[..., torch.Tensor]


class PlannedModule(torch.nn.Module):
    """Runs ``captured`` by ``plan`` on ``mesh`` with the values of ``model``; every rank creates one.

    Its parameters are local pieces under the names of the model (dots become ``/``). ``forward`` takes whole inputs and
    returns whole outputs on every rank, so it can replace the model. Raises ``ConfigError`` if plan and capture have
    different graphs.
    """

    def __init__(self, captured: Captured, plan: OperatorPlan, model: torch.nn.Module, mesh: MeshGroups) -> None:
        super().__init__()
        self.decisions, self.mesh, self.captured = plan.decisions, mesh, captured
        if plan.decisions.graph is not captured.graph:
            raise ConfigError("the plan is of another capture: search the graph of the capture that is to be run.")
        held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
        for name, node in captured.graph.nodes.items():
            if not node.inputs and name in held:
                piece = mesh.piece(held[name].detach(), self.decisions.output_placements(name)).clone()
                if node.is_parameter:
                    self.register_parameter(_key(name), torch.nn.Parameter(piece, held[name].requires_grad))
                else:
                    self.register_buffer(_key(name), piece)
        for name in captured.updates:
            if name not in captured.graph.nodes:  # written but never read, so kept whole
                self.register_buffer(_key(name), held[name].detach().clone())
        self.functions = {name: call.function(name, self.decisions, mesh) for name, call in captured.calls.items()}

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """Return what the model returns for its tensor inputs, in order or by name, as whole tensors.

        Changed buffers (running statistics) keep this rank's piece of their new value.
        """
        given = {**dict(zip(self.captured.inputs, inputs, strict=False)), **named}
        if len(inputs) + len(named) != len(self.captured.inputs) or set(given) != set(self.captured.inputs):
            raise ConfigError(
                f"the captured module takes {', '.join(self.captured.inputs)}, not {len(inputs)} tensors and "
                f"{', '.join(named) or 'no names'}."
            )
        return self.run([given[name] for name in self.captured.inputs], {}, {})

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        arrival: Placements = (),
    ) -> Any:
        """Return what the model returns for ``inputs`` in order.

        ``parameters``: pieces used instead of the module's own; ``buffers``: whole ones, read and updated instead of
        its own. An input that is smaller than the captured one is this rank's piece, placed according to ``arrival``.
        Results with a sample dim then come back in the same pieces, and their gradients are averaged over them.
        """
        # Not getattr: an operator may have the name of a method of a module ("to").
        held = {**self._parameters, **self._buffers}
        pieces = {name: held[_key(name)] for name in self.captured.graph.nodes if _key(name) in held}
        pieces.update({name: value for name, value in parameters.items() if name in pieces})
        for name in buffers.keys() & pieces.keys():
            pieces[name] = self.mesh.piece(buffers[name], self.decisions.output_placements(name))
        in_pieces = False
        for name, value in zip(self.captured.inputs, inputs, strict=True):
            wanted, shape = self.decisions.output_placements(name), self.captured.graph.nodes[name].output_shape
            if tuple(value.shape) == shape:
                pieces[name] = self.mesh.piece(value, wanted)
            else:
                in_pieces = True
                pieces[name] = self._moved(value, arrival, (wanted, None), shape)
        made = execute(self.decisions, pieces, self.functions, self.mesh)
        with torch.no_grad():
            self._keep_changes(made, inputs, buffers, arrival)
        found = [
            plain if name is None else self._result(made, name, arrival if in_pieces else ())
            for name, plain in zip(self.captured.outputs, self.captured.plain_outputs, strict=True)
        ]
        return torch.utils._pytree.tree_unflatten(found, self.captured.structure)

    def _keep_changes(
        self,
        made: dict[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        arrival: Placements,
    ) -> None:
        """Copy in-place changes of the forward into buffers and the caller's inputs."""
        for buffer, operator in self.captured.updates.items():
            changed = self._whole(made, operator)
            if buffer in buffers:
                buffers[buffer].copy_(changed)
                continue
            if buffer in self.captured.graph.nodes:
                changed = self.mesh.piece(changed, self.decisions.output_placements(buffer))
            self.piece_of(buffer).copy_(changed)
        for name, value in zip(self.captured.inputs, inputs, strict=True):
            if name in self.captured.changed_inputs:
                changed = self._whole(made, self.captured.changed_inputs[name])
                value.copy_(changed if changed.shape == value.shape else self.mesh.piece(changed, arrival))

    def _result(self, made: dict[str, torch.Tensor], name: str, arrival: Placements) -> torch.Tensor:
        """Return the whole result, or this rank's samples of it if inputs arrived in pieces."""
        shape = self.captured.graph.nodes[name].output_shape
        if not arrival or shape[:1] != (self.captured.graph.samples,):
            return self._whole(made, name)
        result = self._moved(made[name], self.decisions.output_placements(name), (arrival, arrival), shape)
        if result.requires_grad:
            parts = math.prod(n for n, at in zip(self.mesh.shape, arrival, strict=True) if at != REPLICATE)
            result.register_hook(lambda gradient: gradient / parts)
        return result

    def _whole(self, made: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        shape, placements = self.decisions.graph.nodes[name].output_shape, self.decisions.output_placements(name)
        everywhere = (REPLICATE,) * len(placements)
        return self._moved(made[name], placements, (everywhere, everywhere), shape)

    def _moved(
        self,
        local: torch.Tensor,
        source: Placements,
        wanted: tuple[Placements, Placements | None],
        shape: tuple[int, ...],
    ) -> torch.Tensor:
        """Redistribute an input, result or changed buffer, which is no edge of the plan; count its bytes apart."""
        before = self.mesh.sent_bytes
        result = redistribute(local, source, wanted, shape, self.mesh)
        self.mesh.bytes_beyond_plan += self.mesh.sent_bytes - before
        return result

    def piece_of(self, name: str) -> torch.Tensor:
        """Return the local piece of the model's parameter or buffer ``name``."""
        piece: torch.Tensor = getattr(self, _key(name))
        return piece


def _key(name: str) -> str:
    return name.replace(".", "/")


def execute(
    decisions: Decisions, pieces: Mapping[str, torch.Tensor], functions: Mapping[str, Function], mesh: MeshGroups
) -> dict[str, torch.Tensor]:
    """Return the local outputs of every operator; ``pieces`` holds this rank's piece of each parameter and input.

    ``functions`` has the computation on local pieces by operator name, role or kind, in this order of precedence. The
    plan fixes every redistribution, so the bytes sent are those it predicts, backward included. Readers with equal
    needs of a tensor share one redistribution, and so one reduction of their gradients. Raises ``ConfigError`` for an
    operator without a function, or a mesh that is not the plan's.
    """
    if mesh.shape != decisions.mesh:
        raise ConfigError(f"the plan is for a mesh of {decisions.mesh}, but this mesh is {mesh.shape}.")
    made: dict[str, torch.Tensor] = {}
    shared: dict[tuple[str, tuple[Placements, Placements | None]], torch.Tensor] = {}

    def operand(name: str, slot: int, source: str) -> torch.Tensor:
        key = (source, decisions.wanted(source, name, slot))
        if key not in shared:
            shape = decisions.graph.nodes[source].output_shape
            shared[key] = redistribute(made[source], decisions.output_placements(source), key[1], shape, mesh)
        return shared[key]

    for name, node in decisions.graph.nodes.items():
        if name in pieces:
            made[name] = pieces[name]
            continue
        function = functions.get(name) or functions.get(node.role) or functions.get(node.kind)
        if function is None:
            raise ConfigError(f"operator {name} of kind {node.kind} has no function to compute it.")
        made[name] = function(*(operand(name, slot, source) for slot, source in enumerate(node.inputs)))
    return made
