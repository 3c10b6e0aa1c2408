"""Detects dead nodes: every agent increments a counter in the store, and node 0 watches the counters."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

SILENCE_S = 30.0
"""Seconds after which a node counts as gone; an agent that ends its processes increments nothing for up to 10 s."""
_BEAT_S = 1.0


class Heartbeat:
    """Increments the counter of one node, or of one rank."""

    def __init__(self, store: Any, node_rank: int) -> None:
        self._store, self._node_rank, self._next = store, node_rank, 0.0

    def leave(self, reason: str) -> None:
        """Sign off with a reason, so that the watcher need not wait for the silence."""
        self._store.set(_left(self._node_rank), reason)

    def beat(self) -> None:
        """Increment the counter, at most once a second; call this often."""
        if time.monotonic() >= self._next:
            self._store.add(_key(self._node_rank), 1)
            self._next = time.monotonic() + _BEAT_S


class Watch:
    """Watches the counters of other nodes or ranks."""

    def __init__(self, store: Any, nodes: Iterable[int], silence_s: float | None = None) -> None:
        self._store, self._next = store, 0.0
        self._silence_s = SILENCE_S if silence_s is None else silence_s
        self.reasons: dict[int, str] = {}
        """Reasons by node that signed off."""
        self._seen = {node: (0, time.monotonic()) for node in nodes}

    def begin(self) -> None:
        """Restart the watch after a period without checks."""
        self._seen = {node: (count, time.monotonic()) for node, (count, _) in self._seen.items()}

    def gone(self) -> list[int]:
        """Return nodes that signed off, or whose counter has not changed for ``silence_s`` of watching."""
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
