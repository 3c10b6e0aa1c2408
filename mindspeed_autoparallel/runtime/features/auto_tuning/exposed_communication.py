"""Which parts of a traced block's time could hide: collectives of tensor and expert ranks, matrix products."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_autoparallel.planner.tuner.modelled import BlockKey, ExposedParts
from mindspeed_autoparallel.planner.tuner.pricing import Prices
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.records import DIRECTIONS, BlockTrace, CollectiveCalls

_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.linear", "aten.matmul"})
_TENSOR_KINDS = ("all_gather", "reduce_scatter")


def exposed_parts(trace: BlockTrace, at: MeasuredAt, prices: Prices) -> dict[BlockKey, ExposedParts]:
    """Return the parts by module, block and direction; kernels and links by their prices alone."""
    found = {}
    for module in trace.modules:
        for block, calls in module.calls.items():
            for direction in DIRECTIONS:
                call = calls.of(direction)
                products_us = 0.0
                for place, count in call.operators:
                    operator = trace.operators[place]
                    if operator.name.rsplit(".", 1)[0] in _PRODUCTS:
                        price = prices.operator(operator)
                        products_us += price.time_us * count if price is not None else 0.0
                found[module.name, block, direction] = _shown(call.collectives, products_us, at, prices)
    return found


def _shown(collectives: Iterable[CollectiveCalls], products_us: float, at: MeasuredAt, prices: Prices) -> ExposedParts:
    tensor_ranks = tuple(range(at.tensor_size))
    # Attention may exchange its heads between context ranks by the same operation.
    context_ranks = tuple(range(0, at.tensor_size * at.context_size, at.tensor_size)) if at.context_size > 1 else ()
    tensor_us = exchange_us = 0.0
    destinations = 1
    for item in collectives:
        if item.name in _TENSOR_KINDS and item.ranks == tensor_ranks:
            tensor_us += prices.collective_us(item) * item.count
        elif item.name == "all_to_all" and item.ranks != context_ranks and at.expert_size > 1:
            exchange_us += prices.collective_us(item) * item.count
            nodes = {rank // prices.devices_per_node for rank in item.ranks}
            destinations = len(nodes) if len(nodes) > 1 else len(item.ranks)
    return ExposedParts(
        tensor_us=tensor_us, product_us=products_us, exchange_us=exchange_us, num_destinations=destinations
    )
