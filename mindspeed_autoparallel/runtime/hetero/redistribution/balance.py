"""Which encoder replica computes which item: longest first, to the replica with the least work so far."""

from __future__ import annotations

from collections.abc import Sequence

MODES = ("local", "global", "off")


def longest_first(costs: Sequence[float], num_owners: int) -> list[int]:
    """Return owner of each item. Ends balanced within the longest item: max load - min load <= max(costs). Ties by
    index."""
    loads = [0.0] * num_owners
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(num_owners), key=lambda o: (loads[o], o))
        owners[item] = owner
        loads[owner] += costs[item]
    return owners


def contiguous(num_items: int, num_owners: int) -> list[int]:
    """Return owner of each item when items keep their order and owners get runs of equal length (at most one more)."""
    size, extra = divmod(num_items, num_owners)
    return [owner for owner in range(num_owners) for _ in range(size + (1 if owner < extra else 0))]


def imbalance(costs: Sequence[float], owners: Sequence[int], num_owners: int) -> float:
    """Return largest load over the mean load; 1.0 when there is no work."""
    loads = [0.0] * num_owners
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    total = sum(loads)
    return max(loads) * num_owners / total if total else 1.0
