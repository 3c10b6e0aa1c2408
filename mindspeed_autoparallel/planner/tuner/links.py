"""Latency and bandwidth of collectives: samples in the knowledge base, a straight line per collective and tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.profiles.calibration_records import LinkRow, OperatorRow
from mindspeed_autoparallel.profiles.device import COLLECTIVES, Collective, LinkTier
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase, Operator, Sample, Signature
from mindspeed_autoparallel.profiles.knowledge.signature import Link


def operator_samples(rows: Iterable[OperatorRow], source: str) -> tuple[list[tuple[Operator, Sample]], list[str]]:
    """Return the measurements, and a line for each operator that could not be measured."""
    measured, failed = [], []
    for row in rows:
        if row.reason:
            failed.append(f"{row.name} {list(row.sizes)}: {row.reason}")
        else:
            measured.append((row.operator, row.sample(source)))
    return measured, failed


def single(value_us: float, source: str) -> Sample:
    """Return a sample of one figure without a spread."""
    return Sample(median_us=value_us, p10_us=value_us, p90_us=value_us, num_runs=1, source=source)


TIERS = ("intra", "inter")
SIZES = (4 * 1024, 64 * 1024, 1024 * 1024, 8 * 1024 * 1024)
"""Bytes of the largest tensor of a sampled call."""


def link_operator(kind: str, tier: str, num_ranks: int, size_bytes: int) -> Operator:
    """Return the key of a collective's sample in the knowledge base."""
    return Operator(name=f"collective.{kind}", signature=Signature(Link(tier, num_ranks)), sizes=(size_bytes,))


def link_samples(rows: Iterable[LinkRow], source: str) -> list[tuple[Operator, Sample]]:
    """Return knowledge base entries for the output of a calibrating launch."""
    return [(link_operator(row.kind, row.tier, row.ranks, row.size_bytes), row.sample(source)) for row in rows]


def steps_of(kind: str, num_ranks: int) -> int:
    """Return the number of ring steps of a collective (formulas C1 to C3 of docs/cost-model.md)."""
    return {"p2p": 1, "broadcast": 1, "all_reduce": 2 * (num_ranks - 1)}.get(kind, num_ranks - 1)


def fit(kind: str, num_ranks: int, samples: Sequence[tuple[int, float]]) -> Collective:
    """Return latency of a ring step and bandwidth of a rank's link from ``(size_bytes, time_us)`` of one group size.

    Least squares of the relative error, so that small messages count as much as large ones.
    """
    weights = [1 / time**2 for _, time in samples]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, samples, strict=True)) / total
    mean_time = sum(w * time for w, (_, time) in zip(weights, samples, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, samples, strict=True))
    product = sum(w * (size - mean_size) * (time - mean_time) for w, (size, time) in zip(weights, samples, strict=True))
    slope = max(product / spread if spread else 0.0, 1e-9)
    steps = steps_of(kind, num_ranks)
    moved = steps / num_ranks if kind not in ("p2p", "broadcast") else 1.0
    return Collective(latency_us=max(0.0, mean_time - slope * mean_size) / steps, bytes_per_s=moved / slope * 1e6)


def fitted_tiers(base: KnowledgeBase, device: str, software: str) -> dict[str, LinkTier]:
    """Return the tiers with samples in the knowledge base."""
    return tiers_of(
        LinkRow(
            kind=kind,
            tier=operator.signature.content.tier,
            ranks=operator.signature.content.ranks,
            size_bytes=operator.sizes[0],
            median_us=sample.median_us,
        )
        for kind in COLLECTIVES
        for operator, sample in base.of_name(device, software, f"collective.{kind}")
        if isinstance(operator.signature.content, Link)  # as link_operator made it
    )


def tiers_of(rows: Iterable[LinkRow]) -> dict[str, LinkTier]:
    """Return the sampled tiers; of several group sizes the largest counts."""
    found: dict[str, dict[str, dict[int, list[tuple[int, float]]]]] = {tier: {} for tier in TIERS}
    for row in rows:
        found[row.tier].setdefault(row.kind, {}).setdefault(row.ranks, []).append((row.size_bytes, row.median_us))
    tiers = {}
    for tier, kinds in found.items():
        operations = {kind: fit(kind, max(by_ranks), by_ranks[max(by_ranks)]) for kind, by_ranks in kinds.items()}
        if operations:
            default = operations.get("all_reduce") or next(iter(operations.values()))
            tiers[tier] = LinkTier(default=default, operations=operations)
    return tiers


def catalogue_tier(device: Device, tier: str, devices_per_node: int) -> LinkTier:
    """Return a tier without samples, from the device catalogue."""
    efficiency = next(iter(device.efficiencies.values()))
    if tier == "intra":
        rate = device.link_gb_per_s * 1e9 * efficiency.link_fraction
        return LinkTier(default=Collective(latency_us=efficiency.link_latency_us, bytes_per_s=rate))
    rate = device.network_gbit_per_s / 8 * 1e9 / devices_per_node * efficiency.inter_fraction
    return LinkTier(default=Collective(latency_us=efficiency.inter_latency_us, bytes_per_s=rate))
