"""Ratios of whole blocks' times to the sums of their parts, interpolated between layouts measured whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_autoparallel.profiles import MeasuredAt


@dataclass(frozen=True, kw_only=True)
class Residual:
    """Measured over predicted, as a logarithm, of one block in one direction."""

    block: str
    direction: str
    at: MeasuredAt
    log_ratio: float


@dataclass(frozen=True)
class Corrections:
    """Factor of a layout: a line in the logarithm of the batch among layouts with the same, or the nearest,
    sharding."""

    residuals: Sequence[Residual] = ()
    _known: dict[tuple[str, str, MeasuredAt], float] = field(default_factory=dict, repr=False, compare=False)

    def factor(self, block: str, direction: str, at: MeasuredAt) -> float:
        """Return the factor for the sum of the parts; 1 if the block was never measured."""
        key = (block, direction, at)
        if key not in self._known:
            self._known[key] = math.exp(self._log_factor(block, direction, at))
        return self._known[key]

    def left_out_error(self) -> float | None:
        """Return the mean absolute log error of each residual predicted from the others, or ``None`` without others."""
        errors = []
        for index, residual in enumerate(self.residuals):
            others = [
                other
                for place, other in enumerate(self.residuals)
                if place != index and (other.block, other.direction) == (residual.block, residual.direction)
            ]
            if others:
                found = Corrections(others)._log_factor(residual.block, residual.direction, residual.at)
                errors.append(abs(found - residual.log_ratio))
        return sum(errors) / len(errors) if errors else None

    def _log_factor(self, block: str, direction: str, at: MeasuredAt) -> float:
        own = [item for item in self.residuals if (item.block, item.direction) == (block, direction)]
        if not own:
            return 0.0
        nearest = min(distance(item.at, at) for item in own)
        by_batch: dict[float, list[float]] = {}
        for item in own:
            if distance(item.at, at) == nearest:
                by_batch.setdefault(math.log(item.at.micro_batch_size), []).append(item.log_ratio)
        return _between(math.log(at.micro_batch_size), [(x, sum(ys) / len(ys)) for x, ys in sorted(by_batch.items())])


def distance(a: MeasuredAt, b: MeasuredAt) -> float:
    """Return the number of doublings of shards between two layouts.

    A difference in sequence parallelism, which has other collectives, counts as one.
    """
    sizes = ("tensor_size", "context_size", "expert_size")
    doublings = sum(abs(math.log2(getattr(a, size) / getattr(b, size))) for size in sizes)
    return doublings + (a.sequence_parallel != b.sequence_parallel)


def _between(x: float, line: Sequence[tuple[float, float]]) -> float:
    """Return the straight line between neighbours of ``x``; flat beyond the ends."""
    for (left, low), (right, high) in itertools.pairwise(line):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    return line[0][1] if x < line[0][0] else line[-1][1]
