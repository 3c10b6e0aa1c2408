"""Which nodes are still there: every agent counts up in the store, and the main node looks whether they still do."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

SILENCE_S = 30.0
"""After this a node counts as gone; ending the processes of a launch takes up to 10 s, in which it is silent."""
_BEAT_S = 1.0


class Heartbeat:
    """An agent's side."""

    def __init__(self, store: Any, node_rank: int) -> None:
        self._store, self._node_rank, self._next = store, node_rank, 0.0

    def leave(self, reason: str) -> None:
        """Leave before the node is dismissed, and say why instead of falling silent."""
        self._store.set(_left(self._node_rank), reason)

    def beat(self) -> None:
        """Count up, at most once a second; to be called often."""
        if time.monotonic() >= self._next:
            self._store.add(_key(self._node_rank), 1)
            self._next = time.monotonic() + _BEAT_S


class Watch:
    """The main node's side."""

    def __init__(self, store: Any, nodes: Iterable[int], silence_s: float | None = None) -> None:
        self._store, self._next = store, 0.0
        self._silence_s = SILENCE_S if silence_s is None else silence_s
        self.reasons: dict[int, str] = {}
        """Of nodes that signed off."""
        self._seen = {node: (0, time.monotonic()) for node in nodes}

    def begin(self) -> None:
        """Begin to watch now, after a while without looking."""
        self._seen = {node: (count, time.monotonic()) for node, (count, _) in self._seen.items()}

    def gone(self) -> list[int]:
        """Return nodes that left, or have not counted up for ``silence_s`` while somebody was looking."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _BEAT_S
            for node, (before, _) in self._seen.items():
                count = self._store.add(_key(node), 0)
                if count != before:
                    self._seen[node] = (count, now)
                if self._store.check([_left(node)]):
                    self.reasons[node] = self._store.get(_left(node)).decode()
        return [
            node for node, (_, since) in self._seen.items() if node in self.reasons or now - since > self._silence_s
        ]


def _key(node: int) -> str:
    return f"heartbeat/{node}"


def _left(node: int) -> str:
    return f"left/{node}"
