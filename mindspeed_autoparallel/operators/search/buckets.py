"""Least sums of a factor graph for every value of every variable, by forward and backward elimination.

A bucket whose table would be too large is divided: its variable gets copies that need not agree, and the result is a
lower bound (mini-bucket elimination; Dechter and Rish, 2003).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy

from mindspeed_autoparallel.operators.search.factors import Elimination, FactorGraph, Table


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


class _Buckets(Elimination):
    """Eliminates one variable after another, the one with the smallest table first."""

    def __init__(self, graph: FactorGraph, largest: int) -> None:
        super().__init__(graph)
        self.largest = largest
        self.original = list(range(len(self.sizes)))
        """Maps a copy to its original variable."""
        self.sender: dict[int, int] = {}
        self.buckets: list[_Bucket] = []
        while self.weight:
            v = self.smallest()
            if self.weight[v] > largest and (copies := self._divide(v)):
                self.weight.update({u: self.weight_of(u) for u in (v, *copies)})
                continue
            scope, total, joined = self.eliminate(v)
            children = [self.sender[index] for index in joined if index in self.sender]
            self.sender[self.following - 1] = len(self.buckets)
            message = self.factors[self.following - 1][1]
            self.buckets.append(_Bucket(scope, total, children, message, scope[1:]))

    def _divide(self, v: int) -> list[int]:
        """Divide the factors of ``v`` into groups with small enough tables; all but the first get a copy of ``v``."""
        groups: list[list[int]] = []
        for index in sorted(self.of[v], key=lambda i: (-self.factors[i][1].size, i)):
            for group in groups:
                if math.prod(self.sizes[u] for u in self.scope_of([*group, index])) <= self.largest:
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


def least_sums(graph: FactorGraph, largest: int) -> LeastSums:
    """Find the least sum, and that with each value of each variable, by tables of up to ``largest`` entries.

    A single factor that is larger is not divided.
    """
    done = _Buckets(graph, largest)
    entries = sum(bucket.total.size for bucket in done.buckets)
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
    return LeastSums(least, picks[: len(graph.single)], found, divided, entries)
