"""One cut of one matrix product by the symbolic cost model: its costs and choice, and their log."""

from __future__ import annotations

from dataclasses import dataclass

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
