"""Encoder batches around the pipeline: each batch's rows are sent while the next is computed. Formula H5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

REPEATING = 4
"""Number of equal rounds after which each further one adds the longer of computation and transfer."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """``count`` equal batches: computation, and transfer, of each."""

    count: int
    compute_us: float
    transfer_us: float
    inputs_us: float = 0.0
    """Transfer of a forward's inputs, after the rows of the previous batch; 0: no transfer."""
    before_us: float = 0.0
    """Recomputed forward of a backward, before the wait for its gradients."""


def forward_us(runs: Sequence[Rounds]) -> float:
    """Return the time to receive batch k, compute it, send it, and wait for batch k - 1; transfers are sequential."""
    now = before = arrived = 0.0
    for run in runs:
        for _ in range(min(run.count, REPEATING)):
            now = max(now, before)
            if run.inputs_us:
                now = max(now, arrived) + run.inputs_us
            now += run.compute_us
            before, arrived = arrived, max(now, arrived) + run.transfer_us
        one_by_one = run.inputs_us + run.compute_us + run.transfer_us
        each = one_by_one if run.inputs_us else max(run.compute_us, run.transfer_us)
        more = max(0, run.count - REPEATING) * each
        now, before, arrived = now + more, before + more, arrived + more
    return max(now, arrived)


def backward_us(runs: Sequence[Rounds]) -> float:
    """Return the time to send the gradients of batch k, then compute batch k - 1 with its received gradients."""
    now = arrived = 0.0
    waiting: tuple[float, Rounds] | None = None
    for run in runs:
        for _ in range(min(run.count, REPEATING)):
            arrived = max(now, arrived) + run.transfer_us
            if waiting is not None:
                now = _through(now, *waiting)
            waiting = (arrived, run)
        more = max(0, run.count - REPEATING) * max(run.before_us + run.compute_us, run.transfer_us)
        now, arrived = now + more, arrived + more
        if waiting is not None:
            waiting = (waiting[0] + more, waiting[1])
    return now if waiting is None else _through(now, *waiting)


def _through(now: float, arrived: float, run: Rounds) -> float:
    return max(now + run.before_us, arrived) + run.compute_us
