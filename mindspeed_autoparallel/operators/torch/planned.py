"""A captured module that runs by a plan: this rank's pieces of the parameters, every edge as the plan says."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.strategies import OperatorPlan
from mindspeed_autoparallel.operators.torch.capture import Captured
from mindspeed_autoparallel.operators.torch.execute import execute
from mindspeed_autoparallel.operators.torch.redistribute import MeshGroups, whole


class PlannedModule(torch.nn.Module):
    """``captured`` run by ``plan`` on ``mesh`` with the values of ``model``; every rank makes one.

    Its parameters are local pieces under the names of the model (dots become ``/``); ``forward`` takes the whole
    inputs on every rank and gives whole outputs, so that it can stand where the model stood. Raises ``ConfigError``
    where plan and capture are of two graphs.
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
        self.functions = {name: call.function(name, self.decisions, mesh) for name, call in captured.calls.items()}

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The model's tensor outputs, one alone or a tuple."""
        if len(inputs) != len(self.captured.inputs):
            raise ConfigError(f"the captured module takes {self.captured.inputs}, not {len(inputs)} tensors.")
        pieces = {name: getattr(self, _key(name)) for name in self.captured.graph.nodes if hasattr(self, _key(name))}
        for name, value in zip(self.captured.inputs, inputs, strict=True):
            pieces[name] = self.mesh.piece(value, self.decisions.output_placements(name))
        made = execute(self.decisions, pieces, self.functions, self.mesh)
        found = [whole(made[n], self.decisions.output_placements(n), self.mesh) for n in self.captured.outputs]
        return found[0] if len(found) == 1 else tuple(found)

    def piece_of(self, name: str) -> torch.Tensor:
        """The local piece of the model's parameter or buffer ``name``."""
        piece: torch.Tensor = getattr(self, _key(name))
        return piece


def _key(name: str) -> str:
    return name.replace(".", "/")
