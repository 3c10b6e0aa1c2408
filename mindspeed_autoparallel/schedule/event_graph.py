"""The dependencies of one step: passes and messages as nodes in topological order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.schedule.programs import Action


class EventGraph:
    """Nodes in topological order; node 0 is the start. Every node waits for up to three others."""

    def __init__(self, num_stages: int, num_virtual: int) -> None:
        self.num_stages, self.num_virtual = num_stages, num_virtual
        self._bounds: tuple[list[int], list[int]] | None = None
        self._last_forward: dict[int, int] = {}
        """By stage: the virtual stage of its latest forward."""
        self.waits: list[tuple[int, int, int, int, int, int]] = []
        """Three (node, link) pairs flattened; link ``-1`` costs nothing, missing waits are node 0."""
        self.work: list[tuple[int, Action] | None] = []
        self.rows: list[int] = []
        """Row of a node's duration: 0 for messages, otherwise 1 + 2 x virtual stage (+ 1 for a backward), followed by a
        row per pair of virtual stages."""
        self.pairs: dict[tuple[int, int], int] = {}
        """Virtual stages of a forward and of its paired backward, in the order of their rows."""

    def bounds(self) -> tuple[list[int], list[int]]:
        """Return the nodes of every stage's first and last pass."""
        if self._bounds is None:
            by_stage: list[list[int]] = [[] for _ in range(self.num_stages)]
            for index, work in enumerate(self.work):
                if work is not None:
                    by_stage[work[0]].append(index)
            self._bounds = [nodes[0] for nodes in by_stage], [nodes[-1] for nodes in by_stage]
        return self._bounds

    def add(self, *waits: tuple[int, int], work: tuple[int, Action] | None = None) -> int:
        """Return the new node's index; ``waits``: one to three (node, link)."""
        (a, link_a), (b, link_b), (c, link_c) = (*waits, (0, -1), (0, -1))[:3]
        self.waits.append((a, link_a, b, link_b, c, link_c))
        self.work.append(work)
        row = 0
        if work is not None:
            stage, action = work
            virtual = action.chunk * self.num_stages + stage
            row = 1 + 2 * virtual + (action.kind == "B")
            if action.paired:
                pair = self._last_forward[stage], virtual
                row = self.pairs.setdefault(pair, 1 + 2 * self.num_virtual + len(self.pairs))
            elif action.kind == "F":
                self._last_forward[stage] = virtual
        self.rows.append(row)
        return len(self.work) - 1


Step = TypeVar("Step")


def take_all(steps: Sequence[Sequence[Step]], take: Callable[[int, Step], bool]) -> None:
    """Call ``take(stage, step)`` until it took every step; False: the step still waits, and the other stages continue.

    A step that waits is offered again later. Raises ``ConfigError`` if every stage waits for another.
    """
    position, left = [0] * len(steps), sum(map(len, steps))
    while left:
        before = left
        for stage, own in enumerate(steps):
            while position[stage] < len(own) and take(stage, own[position[stage]]):
                position[stage] += 1
                left -= 1
        if left == before:
            raise ConfigError("this program deadlocks: every stage waits for another.")
