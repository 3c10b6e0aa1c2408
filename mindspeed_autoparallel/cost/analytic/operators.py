"""Time of one traced operator on a device of the catalogue: the longer of its arithmetic and its memory traffic."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mindspeed_autoparallel.cost.analytic.kernels import memory_pass_us, product_us
from mindspeed_autoparallel.cost.device import Device, Efficiency
from mindspeed_autoparallel.profiles.knowledge import Operator
from mindspeed_autoparallel.profiles.knowledge.signature import (
    Argument,
    Call,
    NamedArguments,
    SizeArgument,
    TensorArgument,
)

_BYTES = {
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
}
"""Bytes of an element; four of any other type."""
_FULL_RATE = ("bfloat16", "float16")
_SLOWER_IN_FULL_PRECISION = 2.0
"""fp32 products run on the same units at half of the rate or less."""
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")

Tensor = tuple[tuple[int, ...], str]


def operator_us(device: Device, efficiency: Efficiency, operator: Operator) -> float:
    """Return the microseconds of one call of ``operator`` (as a trace writes it), without the host's launch time."""
    tensors = list(_tensors(operator))
    if not tensors:
        return memory_pass_us(device, efficiency, _new_bytes(operator))
    traffic = memory_pass_us(device, efficiency, _moved_bytes(tensors))
    return max(traffic, _arithmetic_us(device, efficiency, operator.name, tensors))


def _arithmetic_us(device: Device, efficiency: Efficiency, name: str, tensors: list[Tensor]) -> float:
    if name.startswith(_PRODUCTS):
        # A bias or an accumulated result comes before the two factors.
        (left, dtype), (right, _) = tensors[-2:]
        batch = math.prod(left[:-2])
        rate = 1.0 if dtype in _FULL_RATE else _SLOWER_IN_FULL_PRECISION
        # A batch of products fills the device together.
        return rate * product_us(device, efficiency, batch * left[-2], right[-1], left[-1])
    if "attention" in name:
        shapes = [(shape, dtype) for shape, dtype in tensors if len(shape) == 4]
        if len(shapes) < 3:
            return 0.0
        (query, dtype), (key, _) = shapes[0], shapes[1]
        if "backward" in name:
            (query, dtype), (key, _) = shapes[1], shapes[2]
        operations = 4.0 * math.prod(query) * key[-2] * (2.5 if "backward" in name else 1.0)
        rate = 1.0 if dtype in _FULL_RATE else _SLOWER_IN_FULL_PRECISION
        return rate * operations / (device.peak_tflops * 1e6 * efficiency.attention_fraction)
    return 0.0


def _moved_bytes(tensors: list[Tensor]) -> float:
    """Return the bytes that a call moves: it reads every argument and writes a result as large as the largest."""
    sizes = [math.prod(shape) * _BYTES.get(dtype, 4) for shape, dtype in tensors]
    return sum(sizes) + max(sizes)


def _new_bytes(operator: Operator) -> float:
    return 4.0 * math.prod(operator.sizes) if operator.sizes else 0.0


def _tensors(operator: Operator) -> Iterator[Tensor]:
    call = operator.signature.content
    if isinstance(call, Call):
        yield from _walk((*call.args, call.kwargs), iter(operator.sizes))


def _walk(value: Argument, sizes: Iterator[int]) -> Iterator[Tensor]:
    """Yield tensors of a signature, which holds their dtypes; ``sizes`` are consumed in the order they were written."""
    if isinstance(value, tuple):
        for item in value:
            yield from _walk(item, sizes)
    elif isinstance(value, NamedArguments):
        yield from _walk(tuple(item for _, item in value.items), sizes)
    elif isinstance(value, SizeArgument):
        next(sizes)
    elif isinstance(value, TensorArgument):
        yield tuple(next(sizes) for _ in value.order), value.dtype
