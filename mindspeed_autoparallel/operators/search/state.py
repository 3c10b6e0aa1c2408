"""The decisions of a search: per operator, one choice for each mesh dim so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.operators.graph.node import NO_CUT, Graph
from mindspeed_autoparallel.operators.graph.redistribution import Placements


@dataclass
class Decisions:
    """``choices[name][m]``: the axis of operator ``name`` that mesh dim ``m`` (of ``mesh[m]`` devices) cuts."""

    graph: Graph
    mesh: tuple[int, ...] = ()
    choices: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def cuts(self, name: str) -> tuple[tuple[int, int], ...]:
        """List pairs (axis, parts) of the cuts that divide operator ``name``."""
        return tuple(
            (axis, parts) for axis, parts in zip(self.choices.get(name, ()), self.mesh, strict=False) if axis != NO_CUT
        )

    def extend(self, parts: int, chosen: dict[str, int]) -> Decisions:
        """Return the decisions with one more mesh dim, of ``parts`` devices."""
        return Decisions(
            self.graph,
            (*self.mesh, parts),
            {name: (*self.choices.get(name, ()), chosen[name]) for name in self.graph.nodes},
        )

    def without(self, dim: int) -> Decisions:
        choices = {name: (*made[:dim], *made[dim + 1 :]) for name, made in self.choices.items()}
        return Decisions(self.graph, (*self.mesh[:dim], *self.mesh[dim + 1 :]), choices)

    def insert(self, dim: int, parts: int, chosen: dict[str, int]) -> Decisions:
        """Return the decisions with ``chosen`` for a new mesh dim at ``dim``, of ``parts`` devices."""
        choices = {name: (*made[:dim], chosen[name], *made[dim:]) for name, made in self.choices.items()}
        return Decisions(self.graph, (*self.mesh[:dim], parts, *self.mesh[dim:]), choices)

    def output_placements(self, name: str) -> Placements:
        node = self.graph.nodes[name]
        return tuple(node.output_placement(c) for c in self.choices[name])

    def wanted(self, source: str, reader: str, slot: int) -> tuple[Placements, Placements | None]:
        """Return the placement that ``reader`` needs of ``source``, and the one in which it leaves the gradient (None
        without a gradient).

        Readers of one tensor with equal results share a redistribution.
        """
        flows = self.graph.flows_back(source, reader, slot)
        return self.operand_placements(reader, slot), self.gradient_placements(reader, slot) if flows else None

    def operand_placements(self, name: str, slot: int) -> Placements:
        """Return the placements that operator ``name`` needs of input ``slot``."""
        node = self.graph.nodes[name]
        return tuple(node.operand_placement(slot, c) for c in self.choices[name])

    def gradient_placements(self, name: str, slot: int) -> Placements:
        """Return the placements in which backward of ``name`` leaves the gradient of input ``slot``."""
        node = self.graph.nodes[name]
        return tuple(node.gradient_placement(slot, c) for c in self.choices[name])


def device_factors(devices: int) -> tuple[int, ...]:
    """List the prime factors of ``devices``, largest first: one cut each. Raises ``ConfigError`` below 1."""
    if devices < 1:
        raise ConfigError(f"devices={devices}: give the number of devices to plan for, 1 or more.")
    factors: list[int] = []
    rest, factor = devices, 2
    while rest > 1:
        while rest % factor == 0:
            factors.append(factor)
            rest //= factor
        factor += 1 if factor * factor <= rest else rest - factor
    return tuple(sorted(factors, reverse=True))
