"""Where a step's time goes: seconds of the host in each part, no second counted twice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class PhaseTimes:
    """Seconds this rank spent in each part since the last ``reset``."""

    metadata: float = 0.0
    planning: float = 0.0
    encode: float = 0.0
    redistribute: float = 0.0
    backbone: float = 0.0
    generate: float = 0.0
    encoder_backward: float = 0.0
    finalize: float = 0.0

    @contextlib.contextmanager
    def during(self, phase: str, exchange: Any = None) -> Iterator[None]:
        """Count the block for ``phase``, without what ``exchange`` takes in it and what the block gives to other
        phases."""
        started, others = time.perf_counter(), self._total()
        moving = exchange.seconds if exchange is not None else 0.0
        try:
            yield
        finally:
            if exchange is not None:
                self.redistribute += exchange.seconds - moving
            inner = self._total() - others
            setattr(self, phase, getattr(self, phase) + time.perf_counter() - started - inner)

    def reset(self) -> None:
        for name in vars(self):
            setattr(self, name, 0.0)

    def _total(self) -> float:
        return float(sum(vars(self).values()))
