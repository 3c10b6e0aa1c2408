"""Where a captured program sends gradients, observed while it runs once with autograd."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from mindspeed_autoparallel.operators.graph.node import Graph


class ObservedFlows:
    """Note which inputs of which operators a backward sends a gradient to.

    A table of operators can be wrong for one of them (the overwritten side of a copy, an argument whose derivative is
    undefined); a plan would then predict messages that are not sent, or miss some that are.
    """

    def __init__(self) -> None:
        self.arrived: set[tuple[str, int]] = set()

    def watched(self, name: str, slot: int, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` as input ``slot`` of operator ``name`` reads it: a gradient that comes back is noted."""
        if not value.requires_grad:
            return value
        seen = value.view_as(value)
        seen.register_hook(lambda _: self.arrived.add((name, slot)))
        return seen

    def correct(self, graph: Graph, outputs: Iterable[str]) -> None:
        """Write what was observed into ``graph``; ``outputs``: the operators that the module returns."""
        for name, node in graph.nodes.items():
            if not node.inputs:
                continue
            blocked = frozenset(slot for slot in range(len(node.inputs)) if (name, slot) not in self.arrived)
            flows = any(
                graph.nodes[source].needs_gradient for slot, source in enumerate(node.inputs) if slot not in blocked
            )
            graph.nodes[name] = replace(node, needs_gradient=flows, blocked_slots=blocked)
        graph.keep_live_gradients(outputs)
