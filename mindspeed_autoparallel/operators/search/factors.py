"""Minimisation of a sum of tables over variables with few values, by pruning and variable elimination.

A factor is a table over some variables; the sum of all tables is the cost.
"""

from __future__ import annotations

import math
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

    def cost(self, picks: list[int]) -> float:
        """Sum the tables at ``picks``, a value per variable."""
        total = sum(float(s[p]) for s, p in zip(self.single, picks, strict=True))
        return total + sum(float(t[tuple(picks[v] for v in scope)]) for scope, t in self.tables.items())

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


def eliminate(graph: FactorGraph, largest: int = LARGEST_TABLE) -> list[int] | None:
    """Return the values of least sum, by eliminating one variable after another; None if a table would be too large.

    The next variable is the one whose elimination makes the smallest table.
    """
    factors = {index: (scope, table) for index, (scope, table) in enumerate(graph.tables.items())}
    factors.update({len(factors) + v: ((v,), s) for v, s in enumerate(graph.single)})
    sizes = [len(s) for s in graph.single]
    of: list[set[int]] = [set() for _ in sizes]
    for index, (scope, _) in factors.items():
        for v in scope:
            of[v].add(index)
    left, following = set(range(len(sizes))), len(factors)
    trail: list[tuple[int, tuple[int, ...], Table]] = []

    def joined(v: int) -> set[int]:
        return {u for index in of[v] for u in factors[index][0]}

    weight = {v: math.prod(sizes[u] for u in joined(v)) for v in left}
    while left:
        v = min(left, key=lambda u: (weight[u], u))
        if weight[v] > largest:
            return None
        scope = (v, *sorted(joined(v) - {v}))
        total = numpy.zeros([sizes[u] for u in scope])
        for index in of[v]:
            names, table = factors.pop(index)
            order = sorted(range(len(names)), key=lambda a: scope.index(names[a]))
            shape = [sizes[u] if u in names else 1 for u in scope]
            total += table.transpose(order).reshape(shape)
            for u in names:
                if u != v:
                    of[u].discard(index)
        trail.append((v, scope[1:], total.argmin(axis=0)))
        left.discard(v)
        if len(scope) > 1:
            factors[following] = (scope[1:], total.min(axis=0))
            for u in scope[1:]:
                of[u].add(following)
            following += 1
        for u in scope[1:]:
            weight[u] = math.prod(sizes[w] for w in joined(u))
    picks = [0] * len(sizes)
    for v, others, best in reversed(trail):
        picks[v] = int(best[tuple(picks[u] for u in others)])
    return picks
