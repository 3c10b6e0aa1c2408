"""Modelled switches in a tuning run: their variants, their flags, and the variables they need."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.tuner.candidates import ProfileVariant
from mindspeed_autoparallel.planner.tuner.modelled import with_switches
from mindspeed_autoparallel.planner.tuner.pricing import Prices
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.records import PLAIN, TraceResult, VariantName
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.context import SearchContext
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.modelled import Target, modelled_switches
from mindspeed_autoparallel.runtime.features.auto_tuning.exposed_communication import exposed_parts
from mindspeed_autoparallel.spec import Layout


def target_of(device_name: str, chosen: Device | None) -> Target:
    """Return what will train; ``chosen``: a device of the catalogue, of whose host's packages nothing is known."""
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
    """Return variants with modelled switches on, and the switches; ``context`` learns why others were left out."""
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


def sharding_values(layout: Layout) -> dict[str, object]:
    """Return Megatron's arguments of a layout that shards gradients or parameters."""
    if layout.sharding is None:
        return {}
    return {
        "data_parallel_sharding_strategy": layout.sharding.strategy,
        "suggested_communication_unit_size": layout.sharding.communication_unit,
    }


def environment_words(environment: Mapping[str, str]) -> list[str]:
    """Return what stands before a command that needs ``environment``; empty values must not be set."""
    if not environment:
        return []
    unset = [word for name, value in environment.items() if not value for word in ("-u", name)]
    return ["env", *unset, *(f"{name}={value}" for name, value in environment.items() if value)]


@contextlib.contextmanager
def with_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Set ``environment`` within the block, as a training would have it."""
    before = {name: os.environ.get(name) for name in environment}
    try:
        for name, value in environment.items():
            _set(name, value or None)
        yield
    finally:
        for name, old in before.items():
            _set(name, old)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
