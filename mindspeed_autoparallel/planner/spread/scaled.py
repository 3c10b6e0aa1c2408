"""A profile scaled to other samples: block times and bytes times factors."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.data.distribution import Distribution
from mindspeed_autoparallel.planner.spread.factors import SampleFactors
from mindspeed_autoparallel.profiles import BlockCost, Measurement, ModuleCost, Profile, RecomputeCost, SharedBytes

_LARGEST = 1.2
"""Ratio to the largest microbatch: slack for the bound of the memory."""


def mean_profile(profile: Profile, data: Distribution, factors: SampleFactors, share: float = 0.0) -> Profile:
    """Return ``profile`` at the mean microbatch of ``data``, for each micro batch size.

    Its bytes are interpolated by ``share`` between those of the mean microbatch (0) and 1.2 times those of the largest
    (1).
    """
    scales = {}
    names = [module.name for module in profile.model.modules]
    largest = _LARGEST * factors.of(data.sizes()[:, None, :])[1].max(axis=0)
    for size in sorted({measurement.at.micro_batch_size for measurement in profile.measurements}):
        times, sizes = factors.mean(data, size)
        sizes = sizes + share * (largest - sizes)
        scales[size] = (dict(zip(names, times.tolist(), strict=True)), dict(zip(names, sizes.tolist(), strict=True)))
    return scaled_profile(profile, scales)


def scaled_profile(profile: Profile, factors: dict[int, tuple[dict[str, float], dict[str, float]]]) -> Profile:
    """Return ``profile`` with times and bytes of every module scaled.

    ``factors``: by micro batch size, the factor of times and the factor of activations and messages, each by module
    name. Measurements of other micro batch sizes are left out. Model states stay unchanged.
    """
    kept = [
        _scaled(measurement, *factors[measurement.at.micro_batch_size])
        for measurement in profile.measurements
        if measurement.at.micro_batch_size in factors
    ]
    return replace(profile, measurements=tuple(kept), variable_data=None)


def _scaled(measurement: Measurement, times: dict[str, float], sizes: dict[str, float]) -> Measurement:
    largest = max(sizes.values())
    return replace(
        measurement,
        modules={name: _module(cost, times[name], sizes[name]) for name, cost in measurement.modules.items()},
        batch=_shared(measurement.batch, largest),
    )


def _module(cost: ModuleCost, time: float, size: float) -> ModuleCost:
    return replace(
        cost,
        layer=_block(cost.layer, time, size),
        kinds=tuple(_block(kind, time, size) for kind in cost.kinds),
        pre=_block(cost.pre, time, size) if cost.pre is not None else None,
        prediction=_block(cost.prediction, time, size) if cost.prediction is not None else None,
        post=_block(cost.post, time, size) if cost.post is not None else None,
        side=_shared(cost.side, size),
    )


def _block(block: BlockCost, time: float, size: float) -> BlockCost:
    return replace(
        block,
        forward_us=block.forward_us * time,
        backward_us=block.backward_us * time,
        recompute={kind: _recompute(cost, time, size) for kind, cost in block.recompute.items()},
        output_bytes=round(block.output_bytes * size),
    )


def _recompute(cost: RecomputeCost, time: float, size: float) -> RecomputeCost:
    return replace(
        cost,
        saved_bytes=round(cost.saved_bytes * size),
        extra_backward_us=cost.extra_backward_us * time,
        forward_peak_bytes=round(cost.forward_peak_bytes * size),
        backward_peak_bytes=round(cost.backward_peak_bytes * size),
    )


def _shared(shared: SharedBytes, size: float) -> SharedBytes:
    return replace(shared, total_bytes=round(shared.total_bytes * size), kept_bytes=round(shared.kept_bytes * size))
