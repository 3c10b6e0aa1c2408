"""Search of the layered graph: for known cuts, every path that could beat a limit, or the proof that there is none.

A label is a partial path with its value under every cut so far. Adding the least cost to the end (one backward pass
per cut) gives a bound. The search drops labels above the limit, and labels that another one at the same node dominates
under every cut that can still exceed the limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import inf

import numpy

from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.ranges import NEVER, Array, Ranges
from mindspeed_autoparallel.planner.split.settings import SETTINGS


@dataclass
class Labels:
    """Partial paths that end at the same stage."""

    position: Array
    value: Array
    """``[label, cut]``."""
    bound: Array
    """Lower bound of the cost of a path through the label."""
    arcs: Array
    """``[label, stage]``: indices into the stages' ranges."""

    def __len__(self) -> int:
        return len(self.position)

    def take(self, which: Array | slice) -> Labels:
        return Labels(self.position[which], self.value[which], self.bound[which], self.arcs[which])

    @staticmethod
    def join(parts: list[Labels]) -> Labels:
        if len(parts) == 1:
            return parts[0]
        fields = [(part.position, part.value, part.bound, part.arcs) for part in parts]
        return Labels(*(numpy.concatenate(arrays) for arrays in zip(*fields, strict=True)))


class Paths:
    """Ranges of every stage, and what they cost under every cut."""

    def __init__(self, ranges: list[Ranges], num_layers: int) -> None:
        self.ranges, self.num_nodes = ranges, num_layers + 1
        self.cuts: dict[Cut, None] = {}
        self.floor = 0
        """Lower bound of the largest extra (``divisions.bottleneck``)."""

    def copy(self) -> Paths:
        """Return a copy with its own arcs and the same cuts."""
        other = Paths([replace(ranges) for ranges in self.ranges], self.num_nodes - 1)
        other.cuts, other.floor = self.cuts, self.floor
        return other

    def weigh(self) -> bool:
        """Compute the cost of every arc and of the cheapest paths to the end under all cuts. Return whether any path is
        left."""
        forwards = numpy.array([cut.forwards for cut in self.cuts], dtype=numpy.int64)
        backwards = numpy.array([cut.backwards for cut in self.cuts], dtype=numpy.int64)
        tails = numpy.array([cut.tail_stage for cut in self.cuts], dtype=numpy.int64)
        self.constant = numpy.array([cut.constant for cut in self.cuts], dtype=numpy.int64)
        self.cost = [
            ranges.forward[:, None] * forwards[:, stage]
            + ranges.backward[:, None] * backwards[:, stage]
            + ranges.tail[:, None] * (tails == stage)
            for stage, ranges in enumerate(self.ranges)
        ]
        self._potentials()
        return self.bound() < NEVER

    def _potentials(self) -> None:
        num_cuts = len(self.constant)
        least = numpy.full((self.num_nodes, num_cuts), NEVER)
        least[-1] = 0
        self.to_end, self.most_to_end = [least], [numpy.where(least < NEVER, least, -NEVER)]
        for stage in range(len(self.ranges) - 1, -1, -1):
            ranges, cost = self.ranges[stage], self.cost[stage]
            least = numpy.full((self.num_nodes, num_cuts), NEVER)
            most = numpy.full((self.num_nodes, num_cuts), -NEVER)
            if len(ranges):
                first = ranges.first()
                nodes = ranges.start[first]
                least[nodes] = numpy.minimum.reduceat(cost + self.to_end[-1][ranges.end], first)
                most[nodes] = numpy.maximum.reduceat(cost + self.most_to_end[-1][ranges.end], first)
            self.to_end.append(numpy.minimum(least, NEVER))
            self.most_to_end.append(numpy.maximum(most, -NEVER))
        self.to_end.reverse()
        self.most_to_end.reverse()

    def from_start(self) -> list[Array]:
        """Return the least value of partial paths to every node, by stage: ``[node, cut]``."""
        least = numpy.full((self.num_nodes, len(self.constant)), NEVER)
        least[0] = self.constant
        found = [least]
        for ranges, cost in zip(self.ranges, self.cost, strict=True):
            value = cost + found[-1][ranges.start]
            order = numpy.argsort(ranges.end, kind="stable")
            ends = ranges.end[order]
            least = numpy.full((self.num_nodes, len(self.constant)), NEVER)
            if len(order):
                first = numpy.flatnonzero(numpy.diff(ends, prepend=-1))
                least[ends[first]] = numpy.minimum.reduceat(value[order], first)
            found.append(numpy.minimum(least, NEVER))
        return found

    def prune(self, limit: int) -> bool:
        """Drop arcs that are on no path of cost ``limit`` or less. Return whether any path is left."""
        while True:
            before = sum(map(len, self.ranges))
            starts = self.from_start()
            for stage, (ranges, cost) in enumerate(zip(self.ranges, self.cost, strict=True)):
                through = starts[stage][ranges.start] + cost + self.to_end[stage + 1][ranges.end]
                mask = through.max(axis=1) <= limit
                self.cost[stage] = cost[mask]
                ranges.keep(mask)
            self._potentials()
            after = sum(map(len, self.ranges))
            if not all(map(len, self.ranges)) or self.bound() > limit:
                return False
            if after > 0.9 * before:
                return True

    def bound(self) -> int:
        """Return a lower bound of the cost of every path."""
        return int((self.constant + self.to_end[0][0]).max())

    def root(self) -> Labels:
        value = self.constant[None, :].copy()
        return Labels(
            numpy.zeros(1, dtype=numpy.int64),
            value,
            numpy.array([self.bound()]),
            numpy.zeros((1, 0), dtype=numpy.int64),
        )

    def expand(self, labels: Labels, stage: int, limit: int) -> Labels:
        """Return every label within ``limit`` that extends ``labels`` by an arc of ``stage``."""
        ranges, to_end = self.ranges[stage], self.to_end[stage + 1]
        low = numpy.searchsorted(ranges.start, labels.position, "left")
        count = numpy.searchsorted(ranges.start, labels.position, "right") - low
        parent: Array = numpy.repeat(numpy.arange(len(labels)), count)
        arc: Array = numpy.arange(len(parent)) - numpy.repeat(numpy.cumsum(count) - count, count) + low[parent]
        value = labels.value[parent] + self.cost[stage][arc]
        end = ranges.end[arc]
        bound = (value + to_end[end]).max(axis=1)
        kept = numpy.flatnonzero(bound <= limit)
        parent, arc, value, end, bound = parent[kept], arc[kept], value[kept], end[kept], bound[kept]
        arcs = numpy.concatenate([labels.arcs[parent], arc[:, None]], axis=1)
        return Labels(end, value, bound, arcs)

    def undominated(self, labels: Labels, stage: int, limit: int, deadline: float = inf) -> Labels:
        """Return the labels that no other label at their node dominates; cuts that cannot exceed ``limit`` are ignored.

        Labels not compared before the deadline stay.
        """
        if len(labels) < 2:
            return labels
        # Below this value a cut cannot exceed the limit on any continuation, so all such values are equivalent.
        harmless = limit - self.most_to_end[stage + 1][labels.position]
        value = numpy.maximum(labels.value, harmless)
        order = numpy.lexsort((value.sum(axis=1, dtype=numpy.float64), labels.position))
        value, position = value[order], labels.position[order]
        alive: Array = numpy.ones(len(order), dtype=bool)
        first = numpy.flatnonzero(numpy.diff(position, prepend=-1))
        for low, high in zip(first, [*first[1:], len(order)], strict=True):
            if time.monotonic() > deadline:
                break
            left = numpy.arange(low, high)
            for turn in range(1, SETTINGS.paths_most_compared):
                index, left = left[0], left[1:]
                beaten = (value[left] >= value[index]).all(axis=1)
                alive[left[beaten]] = False
                left = left[~beaten]
                if len(left) < 2 or (turn % SETTINGS.paths_worthwhile == 0 and len(left) > high - low - 2 * turn):
                    break
        return labels.take(numpy.sort(order[alive]))

    def beam(self, width: int, limit: int) -> Labels:
        """Return complete paths, best first, from a beam search of ``width`` labels per stage: a heuristic."""
        labels = self.root()
        for stage in range(len(self.ranges)):
            labels = self.undominated(self.expand(labels, stage, limit), stage, limit)
            if len(labels) > width:
                whole = labels.value + self.to_end[stage + 1][labels.position]
                spread = whole.sum(axis=1, dtype=numpy.float64)
                labels = labels.take(numpy.lexsort((spread, labels.bound))[:width])
        return labels.take(numpy.argsort(labels.bound, kind="stable"))

    def _relevant(self, limit: int) -> Paths:
        """Return a copy with only those cuts under which some path exceeds ``limit``."""
        which = self.constant + self.most_to_end[0][0] > limit
        which[0] = True
        other = self.copy()
        other.constant = self.constant[which]
        other.cost = [cost[:, which] for cost in self.cost]
        other.to_end = [least[:, which] for least in self.to_end]
        other.most_to_end = [most[:, which] for most in self.most_to_end]
        return other

    def all_paths(self, limit: int, effort: int, deadline: float) -> tuple[Labels, bool]:
        """Return paths within ``limit``: those of the first block that reaches the end. Also whether none exists.

        After ``effort`` labels or at the deadline it returns no paths and ``False``. The labels left then give no
        bound: each represents others that are equivalent only for ``limit``.
        """
        num_stages = len(self.ranges)
        paths = self._relevant(limit)
        stack = [(0, paths.root())]
        while stack:
            stage, labels = stack.pop()
            if stage == num_stages:
                return labels.take(numpy.argsort(labels.bound, kind="stable")), False
            if effort < 0:
                return labels.take(slice(0)), False
            if len(labels) > SETTINGS.paths_most_labels:
                order = numpy.argsort(labels.bound, kind="stable")
                stack.append((stage, labels.take(order[SETTINGS.paths_most_labels :])))
                labels = labels.take(order[: SETTINGS.paths_most_labels])
            parts: list[Labels] = []
            for low in range(0, len(labels), SETTINGS.paths_slice):
                if time.monotonic() > deadline:
                    return labels.take(slice(0)), False
                parts.append(paths.expand(labels.take(slice(low, low + SETTINGS.paths_slice)), stage, limit))
            following = Labels.join(parts)
            effort -= len(following)
            following = paths.undominated(following, stage, limit, deadline)
            if len(following):
                stack.append((stage + 1, following))
        return paths.root().take(slice(0)), True
