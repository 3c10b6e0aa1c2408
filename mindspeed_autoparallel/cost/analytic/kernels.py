"""Time of one kernel on one device: matrix products with their last wave, attention, elementwise passes."""

from __future__ import annotations

import math

from mindspeed_autoparallel.cost.catalogue import Device, Efficiency

_TILE = 128
_LAST_WAVE = 0.3
"""How much of a wave of tiles a product wastes at its end. Libraries choose tile shapes and split products, so that
less is lost than where every product has to fill whole waves; decision 0050 compares the two."""


def product_us(
    device: Device, efficiency: Efficiency, rows: float, columns: float, inner: float, copies: int = 1
) -> float:
    """Matrix product ``[rows, inner] x [inner, columns]``, or ``copies`` of them in one kernel, in microseconds.

    Output tiles are dealt out to the cores in waves, the last of which is not full; short inner dimensions pay the
    pipeline fill.
    """
    if min(rows, columns, inner) <= 0:
        return 0.0
    waves = copies * math.ceil(rows / _TILE) * math.ceil(columns / _TILE) / device.num_cores
    operations = 2.0 * copies * rows * columns * inner * (1 + _LAST_WAVE / waves)
    return operations / (device.peak_tflops * 1e6 * efficiency.gemm_fraction) * (1 + efficiency.gemm_inner_half / inner)


def linear_us(
    device: Device, efficiency: Efficiency, tokens: float, inputs: float, outputs: float, copies: int = 1
) -> tuple[float, float]:
    """Forward and backward of a linear layer in microseconds: one product forward, two (input, weight) backward.

    ``copies``: experts whose products run as one grouped kernel, ``tokens`` each.
    """
    forward = product_us(device, efficiency, tokens, outputs, inputs, copies)
    backward = product_us(device, efficiency, tokens, inputs, outputs, copies)
    backward += product_us(device, efficiency, inputs, outputs, tokens, copies)
    return forward, backward


def memory_pass_us(device: Device, efficiency: Efficiency, size_bytes: float) -> float:
    """Time to move ``size_bytes`` (reads plus writes) through device memory, in microseconds."""
    return size_bytes / (device.memory_bandwidth_gb_per_s * 1e3 * efficiency.memory_fraction)


def attention_operations(sequence: float, rows: float, width: float, causal_fused: bool) -> float:
    """Operations of the two attention products forward; ``width``: heads x head size; fused kernels skip a half."""
    return 4.0 * rows * sequence * width * (0.5 if causal_fused else 1.0)
