"""The virtual clock of one rank."""

from __future__ import annotations


class VirtualClock:
    """Nanoseconds since the step began, as whole numbers. Time passes by ``advance``, waiting is ``reach``."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.busy_ns = 0

    def advance(self, duration_ns: int) -> None:
        """Compute for ``duration_ns``."""
        self.now_ns += duration_ns
        self.busy_ns += duration_ns

    def reach(self, moment_ns: int) -> None:
        """Wait until ``moment_ns``; nothing happens when it has passed."""
        self.now_ns = max(self.now_ns, moment_ns)
