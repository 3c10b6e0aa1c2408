"""Minimisation of a sum of tables over variables with few values, by pruning and variable elimination.

A factor is a table over some variables; the sum of all tables is the cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy

Table = numpy.ndarray

LARGEST_TABLE = 12_000_000
"""Most entries of a table in the elimination: about 100 MB."""


@dataclass
class FactorGraph:
    """``single[v]`` is the cost of each value of variable ``v``, and ``tables`` over two or more variables."""

    single: list[Table]
    tables: dict[tuple[int, ...], Table] = field(default_factory=dict)

    def add(self, scope: tuple[int, ...], table: Table) -> None:
        """Add ``table``, whose axes are the variables of ``scope``; for a variable named twice its diagonal is used."""
        names = sorted(set(scope))
        table = numpy.einsum(table, [names.index(v) for v in scope], list(range(len(names))))
        if len(names) == 1:
            self.single[names[0]] = self.single[names[0]] + table
            return
        key = tuple(names)
        self.tables[key] = self.tables[key] + table if key in self.tables else table

    def restricted(self, kept: list[Table]) -> FactorGraph:
        """Restrict each variable to the values whose indices ``kept`` lists."""
        tables = {scope: table[numpy.ix_(*(kept[v] for v in scope))] for scope, table in self.tables.items()}
        return FactorGraph([s[k] for s, k in zip(self.single, kept, strict=True)], tables)


def without_dominated(graph: FactorGraph) -> list[Table]:
    """Return, per variable, the values that no other value dominates for all values of the other variables."""
    kept = [numpy.arange(len(s)) for s in graph.single]
    touching: list[list[tuple[int, ...]]] = [[] for _ in graph.single]
    for scope in graph.tables:
        for v in scope:
            touching[v].append(scope)
    current = graph
    for v, single in enumerate(graph.single):
        if len(single) == 1:
            continue
        rows = []
        for scope in touching[v]:
            table = current.tables[scope][numpy.ix_(*(kept[u] for u in scope))]
            rows.append(numpy.moveaxis(table, scope.index(v), 0).reshape(len(single), -1))
        alive = list(range(len(single)))
        order = sorted(alive, key=lambda value: -float(single[value]))
        for value in order:
            others = [other for other in alive if other != value]
            worst = single[others] - single[value] + sum((r[others] - r[value]).max(axis=1) for r in rows)
            if (worst <= 0).any():
                alive.remove(value)
        kept[v] = numpy.array(alive)
    return kept


class Elimination:
    """Joins the factors of one variable after another into a factor of the other variables."""

    def __init__(self, graph: FactorGraph) -> None:
        self.factors = {index: (scope, table) for index, (scope, table) in enumerate(graph.tables.items())}
        self.factors.update({len(self.factors) + v: ((v,), s) for v, s in enumerate(graph.single)})
        self.following = len(self.factors)
        self.sizes = [len(s) for s in graph.single]
        self.of: list[set[int]] = [set() for _ in self.sizes]
        """The factors of every variable."""
        for index, (scope, _) in self.factors.items():
            for v in scope:
                self.of[v].add(index)
        self.weight = {v: self.weight_of(v) for v in range(len(self.sizes))}
        """The table size of every variable that is left."""

    def scope_of(self, indices: Iterable[int]) -> set[int]:
        return {u for index in indices for u in self.factors[index][0]}

    def weight_of(self, v: int) -> int:
        """Return the number of entries of the table that joins the factors of ``v``."""
        return math.prod(self.sizes[u] for u in self.scope_of(self.of[v]))

    def smallest(self) -> int:
        return min(self.weight, key=lambda u: (self.weight[u], u))

    def eliminate(self, v: int) -> tuple[tuple[int, ...], Table, list[int]]:
        """Replace the factors of ``v`` by their least sums, which become the factor ``following - 1``.

        Return the variables of their total, ``v`` first, the total, and the factors that were replaced.
        """
        scope, joined = (v, *sorted(self.scope_of(self.of[v]) - {v})), sorted(self.of[v])
        total = numpy.zeros([self.sizes[u] for u in scope])
        for index in joined:
            names, table = self.factors.pop(index)
            order = sorted(range(len(names)), key=lambda a: scope.index(names[a]))
            total += table.transpose(order).reshape([self.sizes[u] if u in names else 1 for u in scope])
            for u in names:
                self.of[u].discard(index)
        self.factors[self.following] = (scope[1:], total.min(axis=0))
        del self.weight[v]
        for u in scope[1:]:
            self.of[u].add(self.following)
        for u in scope[1:]:
            self.weight[u] = self.weight_of(u)
        self.following += 1
        return scope, total, joined


def eliminate(graph: FactorGraph, largest: int = LARGEST_TABLE) -> list[int] | None:
    """Return the values of least sum, by eliminating one variable after another; None if a table would be too large.

    The next variable is the one whose elimination makes the smallest table.
    """
    left = Elimination(graph)
    trail: list[tuple[tuple[int, ...], Table]] = []
    while left.weight:
        v = left.smallest()
        if left.weight[v] > largest:
            return None
        scope, total, _ = left.eliminate(v)
        trail.append((scope, total.argmin(axis=0)))
    picks = [0] * len(left.sizes)
    for (v, *others), best in reversed(trail):
        picks[v] = int(best[tuple(picks[u] for u in others)])
    return picks
