"""One cut of one matrix product by the symbolic cost model: its costs and choice, and their log."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

INFEASIBLE = 1.7976931348623157e308
"""Cost of a forbidden cut: the largest float, which the log prints."""

CUT_NAMES = ("I", "J", "K", "none")


@dataclass(frozen=True)
class CutCosts:
    """Costs (elements, weighted) of cutting I, J, K or nothing; ``rest``: redistribution from and to decided
    neighbours."""

    operator: tuple[float, float, float, float]
    rest: tuple[float, float, float, float]
    mem_coeff: float
    least_other: float = 0.0
    """The smaller cost of J and K, forbidden or not."""

    @property
    def total(self) -> tuple[float, ...]:
        return tuple(o if o == INFEASIBLE else o + r for o, r in zip(self.operator, self.rest, strict=True))

    @property
    def choice(self) -> str:
        """Return the cheapest cut; a tie goes to the first of I, J, K, none."""
        return CUT_NAMES[self.total.index(min(self.total))]

    @property
    def threshold(self) -> float | None:
        """Return the ``mem_coeff`` at which I costs as much as no cut does now; None if I is forbidden."""
        if self.operator[0] == INFEASIBLE or self.total[3] <= 0:
            return None
        return self.total[0] * self.mem_coeff / self.total[3]

    def log_lines(self) -> list[str]:
        """Return the log: one line per allowed cut, one for no cut, the vector of costs, and the choice."""
        lines = [
            f"If the {name}-axis is cut, the op-cost is {op:g}, the rest-cost is {rest:g}, "
            f"and the total cost is {total:g}"
            for name, op, rest, total in zip(CUT_NAMES, self.operator, self.rest, self.total, strict=True)
            if op != INFEASIBLE and name != "none"
        ]
        lines.append(
            f"If do NOT cut the axis, the op-cost is {self.operator[3]:g}, the rest-cost is {self.rest[3]:g}, "
            f"and the total cost is {self.total[3]:g}"
        )
        vector = ", ".join(f"{value:g}" for value in self.total)
        lines.append(f"The costs of cutting the I-axis/J-axis/K-axis/no_cut are : [const vector]{{{vector}}}")
        lines.append("Choose NOT to cut" if self.choice == "none" else f"Choose to cut the {self.choice}-axis")
        return lines


def cut_costs(
    i: int,
    j: int,
    k: int,
    mem_coeff: float,
    *,
    rest: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    j_is_cut: bool = False,
    k_is_cut: bool = False,
    i_is_allowed: bool = True,
) -> CutCosts:
    """Return the costs of the next halving of A(i,k) B(k,j) at its local sizes in elements.

    I costs ``mem_coeff * j * k / 2``, J ``i * k / 2``, K ``i * j / 2``; not cutting costs m squared over 25, where m is
    the least of the three, forbidden ones included. J and K exclude each other; an odd size cannot be halved;
    ``i_is_allowed`` is False where, with pipeline stages, the cut would split the samples of one microbatch.
    Source: the double recursive search of docs/operators.md.
    """
    by_axis = (mem_coeff * j * k / 2, i * k / 2, i * j / 2)
    least = min(by_axis)
    allowed = (
        i % 2 == 0 and i >= 2 and i_is_allowed,
        j % 2 == 0 and j >= 2 and not k_is_cut,
        k % 2 == 0 and k >= 2 and not j_is_cut,
    )
    cut = [cost if ok else INFEASIBLE for cost, ok in zip(by_axis, allowed, strict=True)]
    return CutCosts((cut[0], cut[1], cut[2], least * least / 25), rest, mem_coeff, min(by_axis[1:]))


_DECADES, _STEPS = 9, 8
"""Values tried in addition to those that the costs suggest: decades up and down, and values per decade."""


@dataclass(frozen=True)
class Advice:
    """A value of ``mem_coeff`` and the axis that the search cuts with it; None if no tried value cuts the product."""

    mem_coeff: float | None
    axis: str
    reason: str = ""

    def line(self) -> str:
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
        return f"{told}its neighbours' cuts make every cut more expensive than none. Pin it, or pin them."
    return f"{told}it is so small that leaving it whole is cheaper at every value. Pin it to cut it."
