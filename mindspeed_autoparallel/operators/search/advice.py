"""The mem_coeff at which an uncut product would be cut, found by trying values in the whole search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from mindspeed_autoparallel.operators.search.matmul_cut import CUT_NAMES, INFEASIBLE, CutCosts

_DECADES, _STEPS = 9, 8
"""Values tried in addition to those that the costs suggest: decades up and down, and values per decade."""


@dataclass(frozen=True)
class Advice:
    """A value of ``mem_coeff`` and the axis that the search cuts with it; None if no tried value cuts the product."""

    mem_coeff: float | None
    axis: str
    reason: str = ""

    def line(self) -> str:
        """Return the advice as one line."""
        if self.mem_coeff is None:
            return f"no mem_coeff cuts it: {self.reason}"
        axis = f"to cut {self.axis} set mem_coeff = {self.mem_coeff:g}"
        return f"{axis} (tried: the whole search cuts it there)" + (f"; {self.reason}" if self.reason else "")


def advise(costs: CutCosts, choice_at: Callable[[float], str]) -> Advice:
    """Find the value nearest to ``costs.mem_coeff`` at which the search, ``choice_at``, cuts the product.

    Candidates are two-digit values around the points at which this cut's own choice changes, and a coarse series. Each
    is tried, nearest first, with the whole search, since other products and earlier cuts change with it. A value that
    cuts I is preferred to a nearer one that cuts another axis.
    """
    now = costs.mem_coeff
    other: Advice | None = None
    for value in sorted(set(_candidates(costs)), key=lambda v: abs(math.log(v / now))):
        choice = choice_at(value)
        if choice == "I":
            return Advice(value, "I")
        if choice != "none" and other is None:
            other = Advice(value, choice, "by I it is not cut at any value that was tried")
    return other or Advice(None, "", _why_not(costs))


def _candidates(costs: CutCosts) -> Iterable[float]:
    """Yield two-digit values around every point at which the choice can change, and around a coarse series."""
    unit = costs.operator[0] / costs.mem_coeff if costs.operator[0] != INFEASIBLE else 0.0
    row = [costs.mem_coeff * 10 ** (step / _STEPS) for step in range(-_DECADES * _STEPS, _DECADES * _STEPS + 1)]
    points = list(row)
    if unit:
        points += [x / unit for x in _crossings(costs) if x > 0]
    for point in points:
        for rounding in (ROUND_CEILING, ROUND_FLOOR):
            value = _two_digits(point, rounding)
            if 0 < value < math.inf:
                yield value


def _crossings(costs: CutCosts) -> Iterable[float]:
    """Yield the costs x of cutting I at which I costs as much as another choice.

    Not cutting costs m squared over 25, where m is the least of x and the costs of J and K, forbidden ones included.
    """
    rests, most = costs.rest, costs.least_other
    for cut in (1, 2):
        if costs.operator[cut] != INFEASIBLE:
            yield costs.operator[cut] + rests[cut] - rests[0]
    yield most * most / 25 + rests[3] - rests[0]
    inside = 1 - 4 * (rests[3] - rests[0]) / 25
    if inside >= 0:
        yield from (25 * (1 + sign * math.sqrt(inside)) / 2 for sign in (-1, 1))
    yield most


def _two_digits(value: float, rounding: str) -> float:
    exact = Decimal(value)
    quantum = Decimal(1).scaleb(exact.adjusted() - 1)
    return float((exact / quantum).to_integral_value(rounding=rounding) * quantum)


def _why_not(costs: CutCosts) -> str:
    forbidden = [name for name, cost in zip(CUT_NAMES, costs.operator, strict=True) if cost == INFEASIBLE]
    if len(forbidden) == 3:
        return "no axis of it can be halved (odd, or cut as far as allowed)."
    told = f"{', '.join(forbidden)} cannot be halved; " if forbidden else ""
    least = replace(costs, rest=(0.0, 0.0, 0.0, 0.0))
    if least.choice != "none":
        return f"{told}its neighbours' cuts make every cut dearer than none. Pin it, or pin them."
    return f"{told}it is so small that leaving it whole is cheaper at every value. Pin it to cut it."
