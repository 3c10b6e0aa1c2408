"""Time of one collective on one link tier: bytes to microseconds. Formulas C1-C3 in docs/cost-model.md."""

from __future__ import annotations

from mindspeed_autoparallel.profiles import LinkTier


def p2p_us(size_bytes: float, link: LinkTier) -> float:
    """C1: one message between neighbours, ``latency + size / bandwidth``."""
    cost = link.of("p2p")
    return cost.latency_us + size_bytes / cost.bytes_per_s * 1e6


def all_reduce_us(size_bytes: float, group_size: int, link: LinkTier) -> float:
    """C2: ring all-reduce of ``size_bytes`` on each rank: ``2 (n - 1) / n`` of it crosses each link."""
    return 2 * _ring_us(size_bytes, group_size, link, "all_reduce")


def all_gather_us(size_bytes: float, group_size: int, link: LinkTier) -> float:
    """C3: ring all-gather; ``size_bytes`` is the gathered tensor."""
    return _ring_us(size_bytes, group_size, link, "all_gather")


def reduce_scatter_us(size_bytes: float, group_size: int, link: LinkTier) -> float:
    """C3: ring reduce-scatter; ``size_bytes`` is the tensor before it."""
    return _ring_us(size_bytes, group_size, link, "reduce_scatter")


def _ring_us(size_bytes: float, group_size: int, link: LinkTier, operation: str) -> float:
    if group_size <= 1 or size_bytes <= 0:
        return 0.0
    cost = link.of(operation)
    steps = group_size - 1
    return steps * cost.latency_us + size_bytes * steps / group_size / cost.bytes_per_s * 1e6
