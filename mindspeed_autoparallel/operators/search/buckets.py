"""Least sums of a factor graph for every value of every variable, by forward and backward elimination.

A bucket whose table would be too large is divided: its variable gets copies that need not agree, and the result is a
lower bound (mini-bucket elimination; Dechter and Rish, 2003).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.operators.search.factors import FactorGraph, Table


@dataclass(frozen=True)
class LeastSums:
    """The least sum, values that have it, and per variable the least sum with each of its values.

    ``divided``: variables with copies; if there are any, sums are lower bounds and the values only a suggestion.
    """

    least: float
    picks: list[int]
    with_value: list[Table]
    divided: list[int]
    entries: int
    """Number of entries of all visited tables."""


@dataclass
class _Bucket:
    """The total of one variable's factors over ``scope``, which begins with that variable, and the outgoing message.

    ``names`` are the variables of the message: the other variables of the scope, or copies of them.
    """

    scope: tuple[int, ...]
    total: Table
    children: list[int]
    message: Table
    names: tuple[int, ...]


class _Elimination:
    """Eliminates one variable after another, the one with the smallest table first."""

    def __init__(self, graph: FactorGraph, largest: int) -> None:
        self.largest = largest
        self.factors = {index: (scope, table) for index, (scope, table) in enumerate(graph.tables.items())}
        self.factors.update({len(self.factors) + v: ((v,), s) for v, s in enumerate(graph.single)})
        self.following = len(self.factors)
        self.sizes = [len(s) for s in graph.single]
        self.of: list[set[int]] = [set() for _ in self.sizes]
        for index, (scope, _) in self.factors.items():
            for v in scope:
                self.of[v].add(index)
        self.original = list(range(len(self.sizes)))
        """Maps a copy to its original variable."""
        self.sender: dict[int, int] = {}
        self.buckets: list[_Bucket] = []
        self.entries = 0

    def run(self) -> None:
        left = set(self.original)
        weight = {v: self._weight(v) for v in left}
        while left:
            v = min(left, key=lambda u: (weight[u], u))
            if weight[v] > self.largest and (copies := self._divide(v)):
                left.update(copies)
                weight.update({u: self._weight(u) for u in (v, *copies)})
                continue
            self._eliminate(v)
            left.discard(v)
            for u in self.buckets[-1].scope[1:]:
                weight[u] = self._weight(u)

    def _scope(self, indices: set[int] | list[int]) -> set[int]:
        return {u for index in indices for u in self.factors[index][0]}

    def _weight(self, v: int) -> int:
        return math.prod(self.sizes[u] for u in self._scope(self.of[v]))

    def _divide(self, v: int) -> list[int]:
        """Divide the factors of ``v`` into groups with small enough tables; all but the first get a copy of ``v``."""
        groups: list[list[int]] = []
        for index in sorted(self.of[v], key=lambda i: (-self.factors[i][1].size, i)):
            for group in groups:
                if math.prod(self.sizes[u] for u in self._scope([*group, index])) <= self.largest:
                    group.append(index)
                    break
            else:
                groups.append([index])
        copies = []
        for group in groups[1:]:
            copy = len(self.sizes)
            self.sizes.append(self.sizes[v])
            self.original.append(self.original[v])
            self.of.append(set(group))
            for index in group:
                names, table = self.factors[index]
                renamed = tuple(copy if u == v else u for u in names)
                self.factors[index] = (renamed, table)
                self.of[v].discard(index)
                if index in self.sender:
                    self.buckets[self.sender[index]].names = renamed
            copies.append(copy)
        return copies

    def _eliminate(self, v: int) -> None:
        scope = (v, *sorted(self._scope(self.of[v]) - {v}))
        total = numpy.zeros([self.sizes[u] for u in scope])
        children = []
        for index in sorted(self.of[v]):
            names, table = self.factors.pop(index)
            if index in self.sender:
                children.append(self.sender[index])
            order = sorted(range(len(names)), key=lambda a: scope.index(names[a]))
            total += table.transpose(order).reshape([self.sizes[u] if u in names else 1 for u in scope])
            for u in names:
                self.of[u].discard(index)
        message = total.min(axis=0)
        self.entries += total.size
        if len(scope) > 1:
            index = self.following
            self.following += 1
            self.factors[index] = (scope[1:], message)
            self.sender[index] = len(self.buckets)
            for u in scope[1:]:
                self.of[u].add(index)
        self.buckets.append(_Bucket(scope, total, children, message, scope[1:]))


def least_sums(graph: FactorGraph, largest: int) -> LeastSums:
    """Find the least sum, and that with each value of each variable, by tables of up to ``largest`` entries.

    A single factor that is larger is not divided.
    """
    done = _Elimination(graph, largest)
    done.run()
    least = sum(float(bucket.message) for bucket in done.buckets if len(bucket.scope) == 1)
    picks = [0] * len(done.sizes)
    found = [numpy.full(len(single), -math.inf) for single in graph.single]
    rest: dict[int, Table] = {}
    for at in reversed(range(len(done.buckets))):
        bucket = done.buckets[at]
        v = bucket.scope[0]
        along: tuple[slice | int, ...] = (slice(None), *(picks[u] for u in bucket.scope[1:]))
        picks[v] = int(numpy.argmin(bucket.total[along]))
        whole = bucket.total + (rest.pop(at)[None] if at in rest else least - float(bucket.message))
        original = done.original[v]
        sums = whole.reshape(len(whole), -1).min(axis=1)
        found[original] = numpy.maximum(found[original], sums)
        for child in bucket.children:
            sent = done.buckets[child]
            others = tuple(a for a, u in enumerate(bucket.scope) if u not in sent.names)
            held = [u for u in bucket.scope if u in sent.names]
            below = whole.min(axis=others).transpose([held.index(u) for u in sent.names])
            rest[child] = below - sent.message
        bucket.total = numpy.zeros(0)
    divided = [done.original[v] for v in range(len(graph.single), len(done.sizes))]
    return LeastSums(least, picks[: len(graph.single)], found, divided, done.entries)
