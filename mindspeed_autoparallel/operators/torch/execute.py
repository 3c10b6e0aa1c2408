"""Runs a plan on real processes: every operator on its local pieces, every edge redistributed as planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.redistribution import Placements
from mindspeed_autoparallel.operators.search.state import Decisions
from mindspeed_autoparallel.operators.torch.redistribute import MeshGroups, redistribute

Function = Callable[..., torch.Tensor]


def execute(
    decisions: Decisions, pieces: Mapping[str, torch.Tensor], functions: Mapping[str, Function], mesh: MeshGroups
) -> dict[str, torch.Tensor]:
    """Return local outputs of every operator; ``pieces`` holds this rank's piece of each parameter and input.

    ``functions`` gives the computation on local pieces, by operator name, role, or kind (the first that is there).
    No edge is left to a library's choice, so the bytes sent are those the plan predicts, backward included. Readers
    that want a tensor alike share one redistribution, and so one reduction of their gradients. Raises ``ConfigError``
    for an operator without a function, or a mesh that is not the plan's.
    """
    if mesh.shape != decisions.mesh:
        raise ConfigError(f"the plan is for a mesh of {decisions.mesh} and this mesh is {mesh.shape}.")
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
