"""Lower bound on the remaining bytes of a redistribution, which guides the search for the shortest one."""

from __future__ import annotations

import math

import numpy

from mindspeed_autoparallel.operators.graph.node import PARTIAL

State = tuple[int, ...]
"""One placement per mesh dim."""
_MOST_DEVICES = 2**12
"""Most devices whose pieces are compared."""


class Remaining:
    """A lower bound on what a device still has to send to reach ``target``, as a share of the tensor.

    A device of a ring sends as much as it receives. Without a pending sum, it must receive the missing part of its
    piece. With a pending sum of P parts, each element needs P - 1 messages until one device has its sum, and one more
    for every other device that holds it at the end.
    """

    def __init__(self, target: State, mesh: tuple[int, ...], num_dims: int) -> None:
        self._mesh, self._devices = mesh, math.prod(mesh)
        self._coordinates = numpy.indices(mesh).reshape(len(mesh), -1) if self._devices <= _MOST_DEVICES else None
        self._target = [self._piece(cut) for cut in _cuts_of(target, num_dims)]
        self._whole = math.prod(size for _, size in self._target)
        self._copies = math.prod(n for n, p in zip(mesh, target, strict=True) if p < 0)
        self._held: dict[tuple[int, tuple[int, ...]], numpy.ndarray] = {}
        self._known: dict[State, float] = {}

    def at_least(self, state: State) -> float:
        """Return the bound from ``state``."""
        if state not in self._known:
            parts = math.prod(n for n, p in zip(self._mesh, state, strict=True) if p == PARTIAL)
            if parts > 1:
                self._known[state] = (parts - 1 + self._copies - 1) / self._devices
            else:
                held = 1.0
                for dim, cut in enumerate(_cuts_of(state, len(self._target))):
                    held = held * self._overlap(dim, cut)
                self._known[state] = max(0.0, self._whole - float(numpy.mean(held)))
        return self._known[state]

    def _overlap(self, dim: int, cut: tuple[int, ...]) -> numpy.ndarray:
        """Return, per device, how much of its final piece of ``dim`` it holds if the mesh dims ``cut`` cut it."""
        if (dim, cut) not in self._held:
            (start, size), (first, least) = self._piece(cut), self._target[dim]
            both = numpy.minimum(start + size, first + least) - numpy.maximum(start, first)
            self._held[dim, cut] = numpy.maximum(both, 0.0)
        return self._held[dim, cut]

    def _piece(self, cut: tuple[int, ...]) -> tuple[numpy.ndarray, float]:
        """Return the start of every device's piece of a dim that the mesh dims ``cut`` cut, and its size, as shares.

        With too many devices all pieces are assumed to start at 0. That overestimates overlaps, so the bound holds.
        """
        start, size = numpy.zeros(1 if self._coordinates is None else self._devices), 1.0
        for at in cut:
            size /= self._mesh[at]
            if self._coordinates is not None:
                start = start + self._coordinates[at] * size
        return start, size


def _cuts_of(state: State, num_dims: int) -> list[tuple[int, ...]]:
    """Return, per tensor dim, the mesh dims that cut it."""
    cuts: list[tuple[int, ...]] = [()] * num_dims
    for at, placement in enumerate(state):
        if placement >= 0:
            cuts[placement] = (*cuts[placement], at)
    return cuts
