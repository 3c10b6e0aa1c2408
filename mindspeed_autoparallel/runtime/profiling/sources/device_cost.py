"""Costs of the device and its links for the planner: measured, from the device catalogue, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.device import Device, usable_bytes
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.tuner.links import TIERS, catalogue_tier
from mindspeed_autoparallel.profiles import Collective, DeviceCost, LinkTier, MeasuredAt
from mindspeed_autoparallel.profiles.records import OptimizerRecord, PointResult

_ASSUMED = Collective(latency_us=10.0, bytes_per_s=10e9)


def device_cost(results: Mapping[MeasuredAt, PointResult]) -> tuple[DeviceCost, list[str]]:
    """Return the costs of the device of ``results``, and notes on what is assumed."""
    notes: list[str] = []
    links: dict[str, dict[str, Collective]] = {}
    for result in results.values():
        links |= result.links
    if played := links_of(results):
        notes.append(f"one device played every layout: links are {played}")
    intra, inter = both_tiers(links, notes)
    rates = [_rate(result.optimizer) for result in results.values()]
    capacity = min(result.memory_capacity_bytes for result in results.values())
    return (
        DeviceCost(
            memory_capacity_bytes=usable_bytes(capacity),
            intra=intra,
            inter=inter,
            optimizer_step_us_per_byte=min(rates),
            runtime_overhead_bytes=min(result.host_bytes for result in results.values()),
        ),
        notes,
    )


def both_tiers(links: Mapping[str, dict[str, Collective]], notes: list[str]) -> tuple[LinkTier, LinkTier]:
    """Return the tiers inside and between nodes by measured ``links``; what is assumed is added to ``notes``."""
    intra, inter = _tier(links.get("intra")), _tier(links.get("inter"))
    if intra is None and inter is None:
        notes.append("one process measured alone: links are assumed at 10 us and 10 GB/s")
        intra = LinkTier(default=_ASSUMED)
    if inter is None:
        notes.append("links between nodes were not measured (one node): those inside the node are used for them")
    if intra is None:
        notes.append("links inside a node were not measured (one process per node): those between nodes are used")
    present = intra or inter
    assert present is not None
    return intra or present, inter or present


def with_peak(cost: DeviceCost, name: str) -> DeviceCost:
    """Return ``cost`` with the 16-bit peak of accelerator ``name``; unchanged if the catalogue has no such entry."""
    try:
        device = find_device(name)
    except ConfigError:
        return cost
    return cost if device.name == "CPU" else replace(cost, peak_flops_per_s=device.peak_tflops * 1e12)


def links_of(results: Mapping[MeasuredAt, PointResult]) -> str:
    """Return the source of the links of ``results``; empty: measured among the ranks."""
    return next((result.links_from for result in results.values() if result.links_from), "")


def played_links(
    device_name: str, given: Device | None, devices_per_node: int, between_nodes: LinkTier | None = None
) -> tuple[dict[str, LinkTier], str]:
    """Return both tiers for a device that measures alone, and their source.

    ``between_nodes``: the tier measured between nodes, if any. Other tiers come from ``given``, the device that the
    user names, else from the catalogue's entry ``device_name``, else they are assumed.
    """
    tiers, source = _unmeasured_links(device_name, given, devices_per_node)
    if between_nodes is None:
        return tiers, source
    return {**tiers, "inter": between_nodes}, f"between nodes measured, one rank of each; inside a node {source}"


def _unmeasured_links(device_name: str, given: Device | None, devices_per_node: int) -> tuple[dict[str, LinkTier], str]:
    try:
        device = given or find_device(device_name)
    except ConfigError:
        assumed = LinkTier(default=_ASSUMED)
        return dict.fromkeys(TIERS, assumed), f"assumed at 10 us and 10 GB/s: the catalogue has no {device_name}"
    source = "the device that --profile-device names" if given else "the device catalogue"
    return {tier: catalogue_tier(device, tier, devices_per_node) for tier in TIERS}, f"of {device.name}, from {source}"


def _tier(operations: dict[str, Collective] | None) -> LinkTier | None:
    if not operations:
        return None
    return LinkTier(default=operations.get("all_reduce") or next(iter(operations.values())), operations=operations)


def _rate(optimizer: OptimizerRecord) -> float:
    return optimizer.step_us / optimizer.parameter_bytes if optimizer.parameter_bytes else 0.0
