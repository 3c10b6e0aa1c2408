"""Time of one kernel on one device: matrix products with their last wave, attention, elementwise passes."""

from __future__ import annotations

import math
from typing import NamedTuple

from mindspeed_autoparallel.cost.analytic.workload import OPERAND_BYTES, Recipe
from mindspeed_autoparallel.cost.device import Device, Efficiency
from mindspeed_autoparallel.errors import ConfigError

_TILE = 128
_LAST_WAVE = 0.3
"""Share of a wave of tiles that a product wastes at its end. Libraries choose tile shapes and split products, so that
they lose less than whole waves would; decision 0026 compares the two."""
_READ = 2
"""Bytes of an element before it is quantized."""


class Times(NamedTuple):
    """Microseconds of one part of a layer: forward, gradient of its input, gradient of its weights."""

    forward_us: float
    input_gradient_us: float
    weight_gradient_us: float = 0.0

    def plus(self, other: Times) -> Times:
        """Return the sum of both, part by part."""
        return Times(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Times:
        return Times(*(factor * value for value in self))

    @property
    def backward_us(self) -> float:
        """Return the time of both gradients."""
        return self.input_gradient_us + self.weight_gradient_us


NOTHING = Times(0.0, 0.0, 0.0)


def narrow_peak_tflops(device: Device, recipe: Recipe) -> float | None:
    """Return the peak of products of ``recipe`` on ``device``; ``None`` without a recipe or such products."""
    if not recipe:
        return None
    return device.peak_fp4_tflops if recipe == "nvfp4" else device.peak_fp8_tflops


def check_recipe(device: Device, recipe: Recipe) -> None:
    """Raise ``ConfigError`` if the device has no products in the recipe's form."""
    if recipe and narrow_peak_tflops(device, recipe) is None:
        figure = "peak_fp4_tflops" if recipe == "nvfp4" else "peak_fp8_tflops"
        raise ConfigError(f"train.precision is {recipe}, but {device.name} has no {figure} in the catalogue.")


def quantize_bytes(recipe: Recipe, *, transposed: bool) -> float:
    """Return bytes moved per element that is quantized, as Transformer Engine's kernels read and write them.

    One scale per tensor: the largest value is found first; a second copy along columns where products need it
    (``transposed``). Blocks: both copies in one pass. Four bits: largest values before and after a Hadamard transform
    in one pass, rows in a second, transformed columns in a third.
    """
    written = OPERAND_BYTES[recipe]
    if recipe == "nvfp4":
        return 3 * _READ + 2 * written
    if recipe == "fp8":
        return 2 * _READ + (2 if transposed else 1) * written
    return _READ + 2 * written


def product_us(
    device: Device,
    efficiency: Efficiency,
    rows: float,
    columns: float,
    inner: float,
    copies: int = 1,
    recipe: Recipe = "",
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
    quantized = narrow_peak_tflops(device, recipe)
    if quantized:
        rate = quantized * 1e6 * efficiency.gemm_fraction * efficiency.fp8_fraction
    return operations / rate * (1 + efficiency.gemm_inner_half / inner)


def linear_us(
    device: Device,
    efficiency: Efficiency,
    tokens: float,
    inputs: float,
    outputs: float,
    copies: int = 1,
    recipe: Recipe = "",
    fraction: float = 1.0,
) -> Times:
    """Return the time of a linear layer: one product forward, two backward.

    ``copies``: experts whose products run as one grouped kernel, ``tokens`` each, at ``fraction`` of a single
    product's speed. With a recipe, inputs and gradients are quantized once each; weights, whose copies are kept over a
    step, are not counted.
    """
    times = Times(
        product_us(device, efficiency, tokens, outputs, inputs, copies, recipe),
        product_us(device, efficiency, tokens, inputs, outputs, copies, recipe),
        product_us(device, efficiency, inputs, outputs, tokens, copies, recipe),
    )
    times = times.times(1 / fraction)
    if not recipe:
        return times
    moved = quantize_bytes(recipe, transposed=device.transposed_fp8)
    into = memory_pass_us(device, efficiency, copies * tokens * inputs * moved)
    back = memory_pass_us(device, efficiency, copies * tokens * outputs * moved)
    return times.plus(Times(into, back))


def memory_pass_us(device: Device, efficiency: Efficiency, size_bytes: float) -> float:
    """Return the time to move ``size_bytes`` (reads plus writes) through device memory, in microseconds."""
    return size_bytes / (device.memory_bandwidth_gb_per_s * 1e3 * efficiency.memory_fraction)


def attention_operations(sequence: float, rows: float, width: float, causal_fused: bool) -> float:
    """Return the operations of both attention products forward; ``width``: heads x head size; fused kernels skip
    half."""
    return 4.0 * rows * sequence * width * (0.5 if causal_fused else 1.0)
