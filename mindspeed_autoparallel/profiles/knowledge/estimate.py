"""Times of operators: measured, interpolated between near ones with an error bar, or absent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_autoparallel.profiles.knowledge.base import KnowledgeBase, Operator

_REACH = math.log(4.0)
"""Largest distance of a usable neighbour, in the logarithm of all sizes together."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time of one call in microseconds; ``relative_error`` is half the width of the interval around it."""

    time_us: float
    relative_error: float
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of a set of calls the base covers."""

    covered_time_share: float
    """Share of the estimated time whose operators were measured; operators without an estimate count as uncovered."""
    missing: tuple[Operator, ...]
    """Operators to measure, the most expensive (or wholly unknown) first."""


def estimate(base: KnowledgeBase, device: str, software: str, operator: Operator) -> Estimate | None:
    """Return the measured time, or one interpolated between sizes of the same signature, or ``None`` without near
    neighbours.

    Between neighbours the logarithm of time is averaged after moving each along a slope of one in the logarithm of work
    (the product of all sizes, to the power 1/2 for a matrix product whose sizes appear twice), weighted by nearness.
    """
    sample = base.find(device, software, operator)
    if sample is not None:
        return Estimate(
            time_us=sample.median_us,
            relative_error=(sample.p90_us - sample.p10_us) / (2 * sample.median_us),
            exact=True,
        )
    near: list[tuple[float, float, float]] = []
    for sizes, found in base.neighbours(device, software, operator):
        if len(sizes) != len(operator.sizes) or 0 in sizes or 0 in operator.sizes:
            continue
        steps = [math.log(wanted / have) for wanted, have in zip(operator.sizes, sizes, strict=True)]
        distance = max(abs(step) for step in steps)
        if distance <= _REACH:
            matrix = operator.name.startswith(("aten.mm", "aten.addmm", "aten.bmm"))
            growth = sum(steps) / 2 if matrix else max(steps, key=abs) if steps else 0.0
            near.append((distance, math.log(found.median_us) + growth, found.p90_us / found.p10_us))
    if not near:
        return None
    weights = [1 / (0.05 + distance) ** 2 for distance, _, _ in near]
    total = sum(weights)
    mean = sum(weight * value for weight, (_, value, _) in zip(weights, near, strict=True)) / total
    spread = sum(weight * (value - mean) ** 2 for weight, (_, value, _) in zip(weights, near, strict=True)) / total
    nearest = min(distance for distance, _, _ in near)
    return Estimate(time_us=math.exp(mean), relative_error=math.sqrt(spread) + 0.3 * nearest, exact=False)


def coverage(base: KnowledgeBase, device: str, software: str, calls: Mapping[Operator, int]) -> Coverage:
    """Return the known part of ``calls`` (operator to count), weighted by time."""
    known = guessed = 0.0
    missing: list[tuple[float, Operator]] = []
    unknown = 0
    for operator, count in calls.items():
        found = estimate(base, device, software, operator)
        if found is None:
            unknown += count
            missing.append((math.inf, operator))
        elif found.exact:
            known += found.time_us * count
        else:
            guessed += found.time_us * count
            missing.append((found.time_us * count, operator))
    # A call without an estimate is assumed to cost the mean of those with one.
    estimated_calls = sum(calls.values()) - unknown
    mean = (known + guessed) / estimated_calls if estimated_calls else 1.0
    total = known + guessed + unknown * mean
    order = sorted(missing, key=lambda item: (-item[0], item[1].name, item[1].sizes))
    return Coverage(
        covered_time_share=known / total if total else 1.0, missing=tuple(operator for _, operator in order)
    )
