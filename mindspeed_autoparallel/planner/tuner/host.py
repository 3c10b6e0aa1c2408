"""Host time per call, and the ratio of kernel times in a model to isolated ones, fitted to whole blocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.planner.tuner.corrections import Corrections, Residual
from mindspeed_autoparallel.profiles import MeasuredAt

_SCALE_BOUNDS = (0.5, 2.5)
_COMMUNICATION_BOUNDS = (0.25, 8.0)
_LEAST_ERROR = 0.03


@dataclass(frozen=True, kw_only=True)
class BlockSums:
    """The sums of a traced block in one direction."""

    operators_us: float
    num_calls: float
    """Calls of any kind, each with a host time."""
    communication_us: Mapping[str, float] = field(default_factory=dict)
    """Time by kind of collective."""


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A block that was measured whole."""

    block: str
    direction: str
    at: MeasuredAt
    sums: BlockSums
    measured_us: float


@dataclass(frozen=True, kw_only=True)
class HostModel:
    """Time of a block: ``scale x operators + per_call x calls + communication``, times the layout's own correction.

    If kernels run asynchronously (``asynchronous``), the longer of kernels and calls counts.
    """

    scale: float = 1.0
    per_call_us: float = 0.0
    communication_scales: Mapping[str, float] = field(default_factory=dict)
    """Factor by kind of collective: in a model ranks enter it at different times."""
    asynchronous: bool = False
    corrections: Corrections = field(default_factory=Corrections)
    relative_error: float = 0.1
    """Mean absolute error of every anchor predicted from the others; a guess without others."""
    num_anchors: int = 0

    def block_us(self, block: str, direction: str, at: MeasuredAt, sums: BlockSums) -> float:
        """Return the predicted time of a block in microseconds."""
        return self.plain_us(sums) * self.corrections.factor(block, direction, at)

    def plain_us(self, sums: BlockSums) -> float:
        """Return the time before the correction, in microseconds."""
        return self.compute_us(sums) + sum(
            self.communication_scales.get(kind, 1.0) * time_us for kind, time_us in sums.communication_us.items()
        )

    def compute_us(self, sums: BlockSums) -> float:
        """Return the time of kernels and host without communication, in microseconds."""
        kernels, host = self.scale * sums.operators_us, self.per_call_us * sums.num_calls
        return max(kernels, host) if self.asynchronous else kernels + host


def fit_host(anchors: Sequence[Anchor], *, asynchronous: bool, fallback: HostModel | None = None) -> HostModel:
    """Return the model that explains ``anchors``, or ``fallback`` (by default plain sums) without anchors."""
    usable = [anchor for anchor in anchors if anchor.measured_us > 0 and anchor.sums.num_calls > 0]
    if not usable:
        return fallback or HostModel(asynchronous=asynchronous)
    alone = [anchor for anchor in usable if not anchor.sums.communication_us]
    scale, per_call = _two_rates(alone or usable, asynchronous)
    model = HostModel(scale=scale, per_call_us=per_call, asynchronous=asynchronous, num_anchors=len(usable))
    model = replace(model, communication_scales=_communication_scales(usable, model))
    corrections = Corrections(
        [
            Residual(
                block=anchor.block,
                direction=anchor.direction,
                at=anchor.at,
                log_ratio=math.log(anchor.measured_us / predicted),
            )
            for anchor in usable
            if (predicted := model.plain_us(anchor.sums)) > 0
        ]
    )
    error = corrections.left_out_error()
    return replace(
        model,
        corrections=corrections,
        relative_error=HostModel.relative_error if error is None else max(_LEAST_ERROR, error),
    )


def _two_rates(anchors: Sequence[Anchor], asynchronous: bool) -> tuple[float, float]:
    """Return scale and microseconds per call by least squares of the relative error; no rate is negative."""
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


def _communication_scales(anchors: Sequence[Anchor], model: HostModel) -> dict[str, float]:
    """Return by kind of collective the median ratio of the measured rest to the predicted communication time.

    The rest is what an anchor's other terms leave. Kinds that occur together share one ratio.
    """
    ratios: dict[str, list[float]] = {}
    for anchor in anchors:
        total = sum(anchor.sums.communication_us.values())
        for kind in anchor.sums.communication_us if total > 0 else ():
            ratios.setdefault(kind, []).append((anchor.measured_us - model.compute_us(anchor.sums)) / total)
    low, high = _COMMUNICATION_BOUNDS
    return {kind: min(max(statistics.median(values), low), high) for kind, values in ratios.items()}
