"""The least recomputation of a rank for every number of whole layers, each recomputed or kept whole.

Linear programs recompute fractions. A rank that holds five layers and has room to keep 1.4 of them whole recomputes
four, not 3.6. This module lists all combinations, so it is limited to ranks with few layers; there, fractions weaken
the bound most.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from math import comb

import numpy

from mindspeed_autoparallel.planner.split.model.problem import LayerKind, SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.settings import SETTINGS


class LeastRecompute:
    """Least recomputation of one stack's layers on one rank, whatever else the rank holds.

    Does not cover stacks of several segments (see ``suits``).
    """

    def __init__(self, problem: SplitProblem, rank: int, group: tuple[int, ...], blocks: dict[int, int]) -> None:
        """``blocks``: segments of one layer that the rank holds in every plan, and their virtual stages."""
        self._problem, self._rank = problem, rank
        self._segment = problem.segments[group[0]]
        self._is_single = len(group) == 1
        self._chunks = range(rank, problem.num_virtual, problem.num_stages)
        others = [s for k, s in enumerate(problem.segments) if k != group[0] and s.beside is None]
        self._least = int(not problem.allow_empty_stages and not others)
        self.fewest = self._least * len(self._chunks)
        """Layers that the rank holds in every plan."""
        self._kinds = _undominated(self._segment.kinds, self._chunks)
        held = [(problem.segments[k].kinds[0], v) for k, v in blocks.items()]
        self._transient = max((kind.transient for kind, _ in held), default=0)
        moments = numpy.array(problem.moments(rank), dtype=numpy.int64)
        self._room: Array = numpy.full(len(moments), problem.memory_limit[rank])
        for kind, v in held:
            self._room -= kind.memory[v] + moments[:, v // problem.num_stages] * kind.saved
        memory = [[kind.memory[v] for v in self._chunks for kind in self._kinds]]
        saved = numpy.array([kind.saved for _ in self._chunks for kind in self._kinds], dtype=numpy.int64)
        self._sizes: Array = memory + saved * numpy.repeat(moments, len(self._kinds), axis=1)
        self._added: Array = numpy.array([kind.extra_backward for _ in self._chunks for kind in self._kinds])
        self._found: list[int | None] = []

    def suits(self, layers: int) -> bool:
        """Return whether the combinations for ``layers`` layers are few enough to list."""
        bins = len(self._added)
        return self._is_single and comb(layers + bins - 1, bins - 1) <= SETTINGS.ranks_most_ways

    def added(self, layers: int) -> int | None:
        """Return the least added backward time of a microbatch in ticks, or ``None`` if ``layers`` layers do not fit.

        With too many combinations to list, the time for fewer layers is the lower bound.
        """
        while len(self._found) <= layers:
            known = self._found[-1] if self._found else 0
            self._found.append(None if known is None else self._least_of(len(self._found), known))
        return self._found[layers]

    def _least_of(self, layers: int, known: int) -> int | None:
        if layers < self.fewest:
            return known
        if not self.suits(layers):
            return known
        ways = _ways(layers, len(self._chunks), len(self._kinds), self._least)
        used = ways @ self._sizes.T
        transient = numpy.array([kind.transient for _ in self._chunks for kind in self._kinds])
        peak = numpy.maximum((numpy.minimum(ways, 1) * transient).max(axis=1, initial=0), self._transient)
        fits = (used + peak[:, None] <= self._room).all(axis=1)
        return int((ways[fits] @ self._added).min()) if fits.any() else None


def _undominated(kinds: tuple[LayerKind, ...], chunks: range) -> list[LayerKind]:
    """Return kinds that no other one equals or beats in time, memory and transients on all chunks."""

    def costs(kind: LayerKind) -> tuple[int, ...]:
        return (kind.extra_backward, kind.transient, kind.saved, *(kind.memory[v] for v in chunks))

    found: list[LayerKind] = []
    for kind in sorted(kinds, key=costs):
        if not any(all(a <= b for a, b in zip(costs(other), costs(kind), strict=True)) for other in found):
            found.append(kind)
    return found


@lru_cache(maxsize=256)
def _ways(layers: int, chunks: int, kinds: int, least: int) -> Array:
    """Return all splits of ``layers`` over chunks and kinds, ``least`` or more per chunk: ``[way, chunk x kind]``."""
    bins = chunks * kinds
    bars: Array = numpy.array(list(itertools.combinations(range(layers + bins - 1), bins - 1)), dtype=numpy.int64)
    bars = bars.reshape(comb(layers + bins - 1, bins - 1), bins - 1)
    ends = numpy.full((len(bars), 1), layers + bins - 1)
    ways: Array = numpy.diff(numpy.concatenate([ends * 0 - 1, bars, ends], axis=1), axis=1) - 1
    held = ways.reshape(len(ways), chunks, kinds).sum(axis=2)
    kept: Array = ways[(held >= least).all(axis=1)]
    return kept
