"""Time of one kernel on one device: matrix products with wave quantisation, attention, elementwise passes."""

from __future__ import annotations

import math

from mindspeed_autoparallel.cost.catalogue import Device, Efficiency

_TILES = ((128, 256), (128, 128))


def product_us(
    device: Device, efficiency: Efficiency, rows: float, columns: float, inner: float, copies: int = 1
) -> float:
    """Matrix product ``[rows, inner] x [inner, columns]``, or ``copies`` of them in one kernel, in microseconds.

    Output tiles are dealt out to the cores in waves, so the last wave may be nearly empty; the better of two tile
    shapes counts, the smaller at ``small_tile_fraction`` of the speed. Short inner dimensions pay the pipeline fill.
    """
    if min(rows, columns, inner) <= 0:
        return 0.0
    best = math.inf
    for index, (height, width) in enumerate(_TILES):
        tiles = copies * math.ceil(rows / height) * math.ceil(columns / width)
        operations = math.ceil(tiles / device.num_cores) * device.num_cores * height * width * inner * 2
        best = min(best, operations / (efficiency.small_tile_fraction if index else 1.0))
    return best / (device.peak_tflops * 1e6 * efficiency.gemm_fraction) * (1 + efficiency.gemm_inner_half / inner)


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
