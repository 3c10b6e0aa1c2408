"""Time of one kernel on one device: matrix products with their last wave, attention, elementwise passes."""

from __future__ import annotations

import math
from typing import NamedTuple

from mindspeed_autoparallel.cost.device import Device, Efficiency

_TILE = 128
_LAST_WAVE = 0.3
"""How much of a wave of tiles a product wastes at its end. Libraries choose tile shapes and split products, so that
less is lost than where every product has to fill whole waves; docs/how/tuning.md compares the two."""
_QUANTIZE_BYTES = 4
"""Bytes moved per element that is quantized: read in two bytes, written in one along rows and one along columns."""


class Times(NamedTuple):
    """Microseconds of one part of a layer: forward, gradient of its input, gradient of its weights."""

    forward_us: float
    input_gradient_us: float
    weight_gradient_us: float = 0.0

    def plus(self, other: Times) -> Times:
        """Return the sum of both, part by part."""
        return Times(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Times:
        """Return ``factor`` of all."""
        return Times(*(factor * value for value in self))

    @property
    def backward_us(self) -> float:
        """Return both gradients."""
        return self.input_gradient_us + self.weight_gradient_us


NOTHING = Times(0.0, 0.0, 0.0)


def product_us(
    device: Device, efficiency: Efficiency, rows: float, columns: float, inner: float, copies: int = 1, recipe: str = ""
) -> float:
    """Return the time of ``[rows, inner] x [inner, columns]``, or of ``copies`` of them in one kernel.

    Output tiles are dealt out to the cores in waves, the last of which is not full; short inner dimensions pay the
    pipeline fill. ``recipe``: the eight-bit recipe whose rate applies, if any.
    """
    if min(rows, columns, inner) <= 0:
        return 0.0
    waves = copies * math.ceil(rows / _TILE) * math.ceil(columns / _TILE) / device.num_cores
    operations = 2.0 * copies * rows * columns * inner * (1 + _LAST_WAVE / waves)
    rate = device.peak_tflops * 1e6 * efficiency.gemm_fraction
    if recipe and device.peak_fp8_tflops:
        rate = device.peak_fp8_tflops * 1e6 * efficiency.gemm_fraction * efficiency.fp8_fraction
    return operations / rate * (1 + efficiency.gemm_inner_half / inner)


def linear_us(
    device: Device,
    efficiency: Efficiency,
    tokens: float,
    inputs: float,
    outputs: float,
    copies: int = 1,
    recipe: str = "",
) -> Times:
    """Return the time of a linear layer: one product forward, two backward.

    ``copies``: experts whose products run as one grouped kernel, ``tokens`` each. With a recipe, inputs and gradients
    are quantized once each; weights, whose copies are kept over a step, are not counted.
    """
    times = Times(
        product_us(device, efficiency, tokens, outputs, inputs, copies, recipe),
        product_us(device, efficiency, tokens, inputs, outputs, copies, recipe),
        product_us(device, efficiency, inputs, outputs, tokens, copies, recipe),
    )
    if not recipe:
        return times
    into = memory_pass_us(device, efficiency, copies * tokens * inputs * _QUANTIZE_BYTES)
    back = memory_pass_us(device, efficiency, copies * tokens * outputs * _QUANTIZE_BYTES)
    return times.plus(Times(into, back))


def memory_pass_us(device: Device, efficiency: Efficiency, size_bytes: float) -> float:
    """Return the time to move ``size_bytes`` (reads plus writes) through device memory, in microseconds."""
    return size_bytes / (device.memory_bandwidth_gb_per_s * 1e3 * efficiency.memory_fraction)


def attention_operations(sequence: float, rows: float, width: float, causal_fused: bool) -> float:
    """Return operations of both attention products forward; ``width``: heads x head size; fused kernels skip half."""
    return 4.0 * rows * sequence * width * (0.5 if causal_fused else 1.0)
