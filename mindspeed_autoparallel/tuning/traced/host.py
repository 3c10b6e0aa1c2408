"""What a call costs beside its kernel, and how far kernels in a model differ from kernels alone: from whole blocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

_SCALE_BOUNDS = (0.5, 2.5)
_COMMUNICATION_BOUNDS = (0.25, 8.0)


@dataclass(frozen=True, kw_only=True)
class BlockSums:
    """What a traced block adds up to, in one direction."""

    operators_us: float
    num_calls: float
    """Calls of any kind: each costs the host's time."""
    communication_us: float


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A block that was measured whole."""

    block: str
    direction: str
    sums: BlockSums
    measured_us: float


@dataclass(frozen=True, kw_only=True)
class HostModel:
    """Time of a block: ``scale x operators + per_call x calls + communication``, times the block's own correction.

    Where kernels run beside the host (``asynchronous``), the longer of kernels and calls counts.
    """

    scale: float = 1.0
    per_call_us: float = 0.0
    communication_scale: float = 1.0
    asynchronous: bool = False
    corrections: dict[tuple[str, str], float] = field(default_factory=dict)
    relative_error: float = 0.1
    """Mean absolute error on the anchors after correction; a guess without anchors."""
    num_anchors: int = 0

    def block_us(self, block: str, direction: str, sums: BlockSums) -> float:
        """Predicted time of a block in microseconds."""
        return self._plain_us(sums) * self.corrections.get((block, direction), 1.0)

    def _plain_us(self, sums: BlockSums) -> float:
        kernels, host = self.scale * sums.operators_us, self.per_call_us * sums.num_calls
        compute = max(kernels, host) if self.asynchronous else kernels + host
        return compute + self.communication_scale * sums.communication_us


def fit_host(anchors: Sequence[Anchor], *, asynchronous: bool, fallback: HostModel | None = None) -> HostModel:
    """The model that explains ``anchors``; ``fallback`` (or plain sums) where there are none."""
    usable = [anchor for anchor in anchors if anchor.measured_us > 0 and anchor.sums.num_calls > 0]
    if not usable:
        return fallback or HostModel(asynchronous=asynchronous)
    alone = [anchor for anchor in usable if not anchor.sums.communication_us]
    scale, per_call = _two_rates(alone or usable, asynchronous)
    base = HostModel(scale=scale, per_call_us=per_call, asynchronous=asynchronous)
    base = HostModel(
        scale=scale, per_call_us=per_call, asynchronous=asynchronous, communication_scale=_communication(usable, base)
    )
    ratios = defaultdict(list)
    for anchor in usable:
        predicted = base.block_us(anchor.block, anchor.direction, anchor.sums)
        if predicted > 0:
            ratios[anchor.block, anchor.direction].append(math.log(anchor.measured_us / predicted))
    corrections = {key: math.exp(sum(values) / len(values)) for key, values in ratios.items()}
    rest = [abs(value - math.log(corrections[key])) for key, values in ratios.items() for value in values]
    return HostModel(
        scale=base.scale, per_call_us=base.per_call_us, communication_scale=base.communication_scale,
        asynchronous=asynchronous, corrections=corrections, num_anchors=len(usable),
        relative_error=max(0.03, sum(rest) / len(rest)),
    )  # fmt: skip


def _two_rates(anchors: Sequence[Anchor], asynchronous: bool) -> tuple[float, float]:
    """Scale and microseconds per call by least squares of the relative error; no rate is negative."""
    rows = [
        (anchor.sums.operators_us / anchor.measured_us, anchor.sums.num_calls / anchor.measured_us)
        for anchor in anchors
    ]
    if asynchronous:
        return 1.0, 0.0
    aa, bb = sum(a * a for a, _ in rows), sum(b * b for _, b in rows)
    ab, ay, by = sum(a * b for a, b in rows), sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    scale = (ay * bb - by * ab) / determinant if determinant > 1e-12 * aa * bb else 1.0
    scale = min(max(scale, _SCALE_BOUNDS[0]), _SCALE_BOUNDS[1])
    return scale, max(0.0, (by - scale * ab) / bb)


def _communication(anchors: Sequence[Anchor], base: HostModel) -> float:
    ratios = sorted(
        (anchor.measured_us - base.block_us("", "", BlockSums(
            operators_us=anchor.sums.operators_us, num_calls=anchor.sums.num_calls, communication_us=0.0,
        ))) / anchor.sums.communication_us
        for anchor in anchors
        if anchor.sums.communication_us > 0
    )  # fmt: skip
    if not ratios:
        return 1.0
    return min(max(ratios[len(ratios) // 2], _COMMUNICATION_BOUNDS[0]), _COMMUNICATION_BOUNDS[1])
