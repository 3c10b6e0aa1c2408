"""Lower bounds on a joint problem: costs shifted between operators and the tensors that they share.

A tensor is one factor of its producer and all readers, so that readers with equal needs pay once in the bound, too.
Least values over such a factor are found over the partitions of its readers into those with equal needs; no table over
all of them is made.
"""

from __future__ import annotations

import copy
import math

import numpy

from mindspeed_autoparallel.operators.search.factors import Table
from mindspeed_autoparallel.operators.search.joint import JointProblem

_MOST_READERS = 7
_MOST_SUMS = 4_000_000
"""Most readers of one factor, and prices times subsets of readers; larger tensors become several factors, each
with a share of the cost."""
_CHECK = 8
"""Rounds between two checks of the bound."""
_LEAST_RISE = 2e-5


class _Grouped:
    """The groups of a variable's values, for the least value of each."""

    def __init__(self, groups: Table, number: int) -> None:
        self.groups, self.number = groups, number
        self.order = numpy.argsort(groups, kind="stable")
        ordered = groups[self.order]
        self.starts = numpy.flatnonzero(numpy.r_[True, ordered[1:] != ordered[:-1]])
        self.present = ordered[self.starts]

    def least(self, values: Table) -> Table:
        result = numpy.full(self.number, numpy.inf)
        result[self.present] = numpy.minimum.reduceat(values[self.order], self.starts)
        return result


class _Tensor:
    """A bound on one tensor's redistributions: ``cost[row, want]``; ``ends[0]`` groups the producer, the others
    readers."""

    def __init__(self, cost: Table, variables: list[int], groups: list[Table]) -> None:
        self.variables = variables
        self.cost, self.ends = _without_unused(cost, groups)
        self.messages = [numpy.zeros(len(g)) for g in groups]

    def least(self, given: list[Table]) -> list[Table]:
        """Return, for each end, the least sum with each of its values; ``given``: a cost per value of each end."""
        row = self.ends[0].least(given[0])
        wants = [end.least(values) for end, values in zip(self.ends[1:], given[1:], strict=True)]
        everyone = (1 << len(wants)) - 1
        sums: dict[int, Table] = {}
        for together in range(1, everyone + 1):
            first = together & -together
            added = wants[first.bit_length() - 1]
            sums[together] = (sums[together ^ first] if together != first else self.cost) + added
        alone = {together: table.min(axis=1) for together, table in sums.items()}
        best: dict[int, Table] = {0: numpy.zeros(len(self.cost))}
        for held in range(1, everyone + 1):
            first = held & -held
            ways = [alone[t] + best[held ^ t] for t in range(1, held + 1) if t & held == t and t & first]
            best[held] = numpy.minimum.reduce(ways)
        result = [given[0] + best[everyone][self.ends[0].groups]]
        by_want = {t: (table + (row + best[everyone ^ t])[:, None]).min(axis=0) for t, table in sums.items()}
        for reader, (end, values) in enumerate(zip(self.ends[1:], given[1:], strict=True)):
            least = numpy.minimum.reduce([by_want[t] for t in by_want if t >> reader & 1])
            with numpy.errstate(invalid="ignore"):
                result.append((least - wants[reader])[end.groups] + values)
        return result

    def restrict(self, kept: list[Table]) -> None:
        groups = [end.groups[kept[v]] for end, v in zip(self.ends, self.variables, strict=True)]
        self.messages = [m[kept[v]] for m, v in zip(self.messages, self.variables, strict=True)]
        self.cost, self.ends = _without_unused(self.cost, groups)


def _without_unused(cost: Table, groups: list[Table]) -> tuple[Table, list[_Grouped]]:
    rows: Table = numpy.unique(groups[0])
    of_producer = numpy.asarray(numpy.searchsorted(rows, groups[0]))
    wanted = numpy.unique(numpy.concatenate(groups[1:]))
    readers = [numpy.asarray(numpy.searchsorted(wanted, g)) for g in groups[1:]]
    ends = [_Grouped(of_producer, len(rows)), *(_Grouped(g, len(wanted)) for g in readers)]
    return numpy.ascontiguousarray(cost[numpy.ix_(rows, wanted)]), ends


class Dual:
    """A lower bound on ``problem``; ``kept[v]``: values that variable ``v`` may still have in a sum below the upper."""

    def __init__(self, problem: JointProblem) -> None:
        self.single: list[Table] = [us.astype(float) for us in problem.node_us]
        self.kept = [numpy.arange(len(us)) for us in self.single]
        self.tensors = _tensors(problem, self.single)
        self.bound = -math.inf

    @property
    def entries(self) -> int:
        """Return the number of prices that one round visits."""
        return sum(tensor.cost.size << len(tensor.ends) for tensor in self.tensors)

    def only(self, v: int, places: Table) -> Dual:
        """Return this bound with variable ``v`` restricted to the values at ``places`` of ``kept[v]``."""
        made = copy.copy(self)
        made.tensors = [copy.copy(tensor) for tensor in self.tensors]
        made._restrict([places if u == v else numpy.arange(len(s)) for u, s in enumerate(self.single)])
        return made

    def raise_bound(self, upper: float, rounds: int) -> int:
        """Shift costs until the bound stops rising or meets ``upper``; drop values that no sum below ``upper`` has.

        Returns the number of rounds.
        """
        before = -math.inf
        for turn in range(1, rounds + 1):
            self._shift(self.tensors if turn % 2 else self.tensors[::-1])
            if turn % _CHECK and turn != rounds:
                continue
            least = [t.least([-m for m in t.messages])[0].min() for t in self.tensors]
            now = sum(float(s.min()) for s in self.single) + sum(map(float, least))
            self.bound = max(self.bound, now)
            if self.bound >= upper * (1 - 1e-9):
                break
            fits = [s - s.min() + now <= upper * (1 + 1e-9) for s in self.single]
            if not all(map(numpy.all, fits)):
                self._restrict([numpy.flatnonzero(fit) for fit in fits])
            if now - before < _LEAST_RISE * abs(now):
                break
            before = now
        return turn

    def _shift(self, tensors: list[_Tensor]) -> None:
        """Move the costs of each tensor's ends into the tensor, and equal shares of its least sums back to the ends."""
        single = self.single
        for tensor in tensors:
            for v, message in zip(tensor.variables, tensor.messages, strict=True):
                single[v] = single[v] - message
            given = [single[v] / tensor.variables.count(v) for v in tensor.variables]
            made = tensor.least(given)
            tensor.messages = [m / len(made) - g for m, g in zip(made, given, strict=True)]
            for v, message in zip(tensor.variables, tensor.messages, strict=True):
                single[v] = single[v] + message

    def _restrict(self, places: list[Table]) -> None:
        self.single, self.kept = ([x[p] for x, p in zip(xs, places, strict=True)] for xs in (self.single, self.kept))
        for tensor in self.tensors:
            tensor.restrict(places)


def _tensors(problem: JointProblem, single: list[Table]) -> list[_Tensor]:
    """Return the factors of ``problem``; reads by the producer itself are added to its own costs in ``single``."""
    found = []
    for read in problem.reads:
        producer, cost = read.producer, read.cost_us
        rows = numpy.arange(len(cost))
        own = [wants for v, wants in read.readers if v == producer]
        if own:
            cost = cost.copy()
            for wants in own:
                single[producer] = single[producer] + cost[rows, wants]
                cost[rows, wants] = 0.0
        if not cost.any():
            continue
        readers = [(v, wants) for v, wants in read.readers if v != producer]
        different, rows = numpy.unique(cost, axis=0, return_inverse=True)
        together = max(1, min(_MOST_READERS, int(math.log2(max(2.0, _MOST_SUMS / different.size)))))
        number = math.ceil(len(readers) / together)
        for start in range(number):
            held = readers[start::number]
            variables, groups = [producer, *(v for v, _ in held)], [rows.ravel(), *(wants for _, wants in held)]
            found.append(_Tensor(different / number, variables, groups))
    return found
