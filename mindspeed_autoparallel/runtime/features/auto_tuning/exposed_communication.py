"""Which parts of a traced block's time could hide: collectives of tensor and expert ranks, matrix products."""

from __future__ import annotations

from typing import Any

from mindspeed_autoparallel.planner.tuner.modelled import BlockKey, Shown
from mindspeed_autoparallel.planner.tuner.pricing import DIRECTIONS, Prices, Trace, operators_of
from mindspeed_autoparallel.profiles import MeasuredAt

_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.linear", "aten.matmul"})
_TENSOR_KINDS = ("all_gather", "reduce_scatter")


def shown_parts(trace: Trace, at: MeasuredAt, prices: Prices) -> dict[BlockKey, Shown]:
    """By module, block and direction; kernels and links by their prices alone."""
    operators = operators_of(trace)
    found = {}
    for module in trace["modules"]:
        for block, calls in module["calls"].items():
            for direction in DIRECTIONS:
                call = calls[direction]
                products = 0.0
                for place, count in call["operators"]:
                    if operators[place].name.rsplit(".", 1)[0] in _PRODUCTS:
                        price = prices.operator(operators[place])
                        products += price.time_us * count if price is not None else 0.0
                found[module["name"], block, direction] = _shown(call["collectives"], products, at, prices)
    return found


def _shown(collectives: list[dict[str, Any]], products_us: float, at: MeasuredAt, prices: Prices) -> Shown:
    tensor_ranks = tuple(range(at.tensor_size))
    # Attention may exchange its heads between context ranks by the same operation.
    context_ranks = tuple(range(0, at.tensor_size * at.context_size, at.tensor_size)) if at.context_size > 1 else ()
    tensor_us = exchange_us = 0.0
    destinations = 1
    for item in collectives:
        ranks = tuple(item["ranks"])
        if item["name"] in _TENSOR_KINDS and ranks == tensor_ranks:
            tensor_us += prices.collective_us(item) * item["count"]
        elif item["name"] == "all_to_all" and ranks != context_ranks and at.expert_size > 1:
            exchange_us += prices.collective_us(item) * item["count"]
            nodes = {rank // prices.devices_per_node for rank in ranks}
            destinations = len(nodes) if len(nodes) > 1 else len(ranks)
    return Shown(tensor_us=tensor_us, product_us=products_us, exchange_us=exchange_us, num_destinations=destinations)
