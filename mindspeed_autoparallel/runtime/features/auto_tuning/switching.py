"""Variants with switches that were never measured, priced by the part of a traced block that they can hide."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.tuner.candidates import ProfileVariant
from mindspeed_autoparallel.planner.tuner.modelled import BlockKey, ExposedParts, with_switches
from mindspeed_autoparallel.planner.tuner.pricing import Prices
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.records import (
    DIRECTIONS,
    PLAIN,
    BlockTrace,
    CollectiveCalls,
    TraceResult,
    VariantName,
)
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.modelled import Target, modelled_switches
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.variants import SearchContext


def target_of(device_name: str, chosen: Device | None) -> Target:
    """Return the training device; ``chosen``: a device of the catalogue, whose installed packages are unknown."""
    if chosen is not None:
        return Target(device=chosen, installed=lambda package: True)
    try:
        device = find_device(device_name)
    except ConfigError:
        device = None
    return Target(device=device, installed=lambda package: importlib.util.find_spec(package) is not None)


def modelled_variants(
    variants: Sequence[ProfileVariant],
    context: SearchContext,
    traces: Mapping[MeasuredAt, TraceResult],
    prices: Prices,
    target: Target,
) -> tuple[list[ProfileVariant], list[str]]:
    """Return variants with modelled switches on, and the switches; the reasons for the others go to ``context``."""
    offered = modelled_switches(context, target)
    if not offered.titles:
        return [], []
    parts = {
        variant.name: {
            point: exposed_parts(trace, point, prices)
            for point, result in traces.items()
            if (trace := result.variants.get(VariantName(variant.name, PLAIN))) is not None
        }
        for variant in variants
    }
    return with_switches(variants, offered.groups, offered.alone, parts), offered.titles


_PRODUCTS = frozenset({"aten.mm", "aten.addmm", "aten.linear", "aten.matmul"})
_TENSOR_KINDS = ("all_gather", "reduce_scatter")


def exposed_parts(trace: BlockTrace, at: MeasuredAt, prices: Prices) -> dict[BlockKey, ExposedParts]:
    """Return the exposed parts by module, block and direction, by prices of kernels and links without host overhead."""
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
