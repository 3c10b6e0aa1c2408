"""Operators as nodes with axes: one cut of an operator is one axis (or none), and every placement follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.errors import ConfigError

REPLICATE = -1
PARTIAL = -2
"""A placement on one mesh dim: the tensor dim that is cut (0, 1, ..), ``REPLICATE``, or ``PARTIAL`` (a pending sum)."""

NO_CUT = -1
"""The choice of an operator without a cut axis."""


@dataclass(frozen=True)
class Axis:
    """One loop of an operator, ``size`` elements long; softmax and norm axes are not ``cuttable``."""

    name: str
    size: int
    cuttable: bool = True


@dataclass(frozen=True)
class Node:
    """One operator, parameter or input.

    ``operands[s][d]`` and ``output[d]`` give the axis of dim ``d`` (None: that dim is never cut). An axis in no dim of
    the output is summed over: cutting it leaves a pending sum. ``matmul`` names the axes (i axes, j, k) of
    C(i,j) = A(i,k) B(k,j). ``role`` is equal for the same operator of repeated layers.
    """

    name: str
    kind: str
    axes: tuple[Axis, ...]
    output_shape: tuple[int, ...]
    output: tuple[int | None, ...]
    inputs: tuple[str, ...] = ()
    operands: tuple[tuple[int | None, ...], ...] = ()
    role: str = ""
    item_bytes: int = 2
    flops: int = 0
    is_parameter: bool = False
    needs_gradient: bool = True
    matmul: tuple[tuple[int, ...], int, int] | None = None
    known: bool = True
    kind_detail: str = ""
    blocked_slots: frozenset[int] = frozenset()
    """Inputs that get no gradient from this operator: an index, a detached tensor, one that only gives its shape."""

    def operand_placement(self, slot: int, choice: int) -> int:
        """Return the placement that this operator needs of input ``slot`` when axis ``choice`` is cut."""
        if choice == NO_CUT or choice not in self.operands[slot]:
            return REPLICATE
        return self.operands[slot].index(choice)

    def output_placement(self, choice: int) -> int:
        """Return the placement of the output when axis ``choice`` is cut."""
        if choice == NO_CUT:
            return REPLICATE
        return self.output.index(choice) if choice in self.output else PARTIAL

    def gradient_placement(self, slot: int, choice: int) -> int:
        """Return the placement in which this operator's backward leaves the gradient of input ``slot``."""
        placement = self.operand_placement(slot, choice)
        return PARTIAL if placement == REPLICATE and choice != NO_CUT else placement

    def local_size(self, axis: int, cuts: Iterable[tuple[int, int]] = ()) -> int:
        """Return the size of ``axis`` on one device after ``cuts``, pairs of (axis, parts)."""
        return self.axes[axis].size // math.prod(parts for cut, parts in cuts if cut == axis)

    def choices(self, parts: int, cuts: Iterable[tuple[int, int]] = ()) -> list[int]:
        """List ``NO_CUT`` and every cuttable axis that ``parts`` divides after the earlier ``cuts``."""
        done = tuple(cuts)
        return [NO_CUT] + [
            a
            for a, axis in enumerate(self.axes)
            if axis.cuttable and self.local_size(a, done) >= parts and self.local_size(a, done) % parts == 0
        ]

    @property
    def output_bytes(self) -> int:
        return math.prod(self.output_shape) * self.item_bytes


@dataclass
class Graph:
    """Nodes by name; every producer precedes its consumers."""

    nodes: dict[str, Node] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    """Operators without a rule (node name to operator name): treated as replicated."""
    samples: int = 0
    """Samples that the graph computes at once, over all devices; 0: unknown."""

    def flows_back(self, source: str, reader: str, slot: int) -> bool:
        """Return whether backward sends a gradient from input ``slot`` of ``reader`` to ``source``."""
        node = self.nodes[reader]
        return self.nodes[source].needs_gradient and node.needs_gradient and slot not in node.blocked_slots

    def keep_live_gradients(self, outputs: Iterable[str]) -> None:
        """Remove the gradient of every operator and parameter that none of ``outputs`` depends on."""
        live = {name for name in outputs if self.nodes[name].needs_gradient}
        for name in reversed(self.nodes):
            for slot, source in enumerate(self.nodes[name].inputs):
                if name in live and self.flows_back(source, name, slot):
                    live.add(source)
        for name, node in self.nodes.items():
            if node.needs_gradient and name not in live:
                self.nodes[name] = replace(node, needs_gradient=False)

    def add(self, node: Node) -> str:
        """Append ``node``; raises ``ConfigError`` for a duplicate name or an undefined input."""
        if node.name in self.nodes:
            raise ConfigError(f"two operators are called {node.name}; rename one.")
        for name in node.inputs:
            if name not in self.nodes:
                raise ConfigError(f"operator {node.name} reads {name}, which is not defined before it.")
        self.nodes[node.name] = node
        if not node.known:
            self.unknown[node.name] = node.kind_detail or node.kind
        return node.name

    def consumers(self) -> dict[str, list[tuple[str, int]]]:
        """Map each node to its readers as (name, input slot)."""
        result: dict[str, list[tuple[str, int]]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            for slot, source in enumerate(node.inputs):
                result[source].append((node.name, slot))
        return result

    def edges(self) -> Iterable[tuple[Node, Node, int]]:
        """Yield every (producer, consumer, input slot)."""
        for node in self.nodes.values():
            for slot, source in enumerate(node.inputs):
                yield self.nodes[source], node, slot
