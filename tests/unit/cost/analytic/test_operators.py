"""Prices of traced operators: properties that hold for any device figures."""

import pytest

from mindspeed_autoparallel.cost.analytic.kernels import product_us
from mindspeed_autoparallel.cost.analytic.operators import operator_us
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.profiles.knowledge import Operator, Signature

_H100 = find_device("H100")
_EFFICIENCY = _H100.efficiency("megatron-core")


def _operator(name: str, *shapes: tuple[int, ...], dtype: str = "bfloat16", number: int | None = None) -> Operator:
    template: list[object] = [{"dtype": dtype, "order": list(range(len(shape)))} for shape in shapes]
    sizes = [size for shape in shapes for size in shape]
    if number is not None:
        template.insert(0, {"size": 1})
        sizes.insert(0, number)
    return Operator(name=name, signature=Signature.of_json([template, {"map": {}}]), sizes=tuple(sizes))


def _us(operator: Operator) -> float:
    return operator_us(_H100, _EFFICIENCY, operator)


def test_a_large_product_takes_the_time_of_the_formula() -> None:
    product = _operator("aten.mm.default", (8192, 4096), (4096, 16384))
    assert _us(product) == product_us(_H100, _EFFICIENCY, 8192, 16384, 4096)


def test_a_bias_does_not_change_the_factors() -> None:
    plain = _us(_operator("aten.mm.default", (8192, 4096), (4096, 16384)))
    biased = _us(_operator("aten.addmm.default", (16384,), (8192, 4096), (4096, 16384)))
    assert biased == pytest.approx(plain)


def test_products_in_full_precision_are_slower() -> None:
    shapes = ((8192, 4096), (4096, 16384))
    assert _us(_operator("aten.mm.default", *shapes, dtype="float32")) > 1.5 * _us(
        _operator("aten.mm.default", *shapes)
    )


def test_an_elementwise_pass_takes_its_traffic_and_grows_with_the_tensor() -> None:
    small, large = (_us(_operator("aten.mul.Tensor", (n, 4096), (n, 4096))) for n in (1024, 4096))
    assert large == pytest.approx(4 * small)
    # Two reads and a write of 32 MiB each at what memory reaches.
    expected = 3 * 4096 * 4096 * 2 / (_H100.memory_bandwidth_gb_per_s * 1e3 * _EFFICIENCY.memory_fraction)
    assert large == pytest.approx(expected)


def test_attention_grows_with_the_square_of_the_sequence_and_its_backward_costs_more() -> None:
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    short, long = ((1, 32, length, 128) for length in (4096, 8192))
    forward = _us(_operator(f"{name}.default", short, short, short))
    assert _us(_operator(f"{name}.default", long, long, long)) == pytest.approx(4 * forward)
    assert _us(_operator(f"{name}_backward.default", short, short, short, short)) == pytest.approx(2.5 * forward)


def test_sizes_that_are_no_tensor_are_passed_over() -> None:
    plain, with_size = (_us(_operator("aten.softmax.int", (64, 1024), number=n)) for n in (None, 1024))
    assert with_size == plain
    assert (
        _us(
            Operator(
                name="aten.arange.default", signature=Signature.of_json([[{"size": 1}], {"map": {}}]), sizes=(1024,)
            )
        )
        > 0
    )
