"""The layers of a problem in one row, cut into virtual stages at ``num_virtual - 1`` boundaries.

Pre and post blocks belong to the first or last layer of their segment, and joined layers count as one. Parallel
branches follow each other in the row, which is one of their possible orders.
"""

from __future__ import annotations

import numpy

from mindspeed_autoparallel.planner.split.model.problem import SplitProblem
from mindspeed_autoparallel.planner.split.model.recompute_choice import Array
from mindspeed_autoparallel.planner.split.model.solution import Placement
from mindspeed_autoparallel.spec.model import each_after_all


def fits_a_row(problem: SplitProblem) -> bool:
    """Return whether the segments can form a row: blocks beside a segment are single, and joints leave enough parts for
    the virtual stages."""
    if any(segment.num_layers != 1 for segment in problem.segments if segment.beside is not None):
        return False
    # Joined parallel branches have another module between them in the row, which the joint then covers.
    return not problem.joints or problem.allow_empty_stages or LayerRow(problem).num_layers >= problem.num_virtual


def is_one_row(problem: SplitProblem) -> bool:
    """Return whether every placement is a cut of the row: each segment depends on all segments before it."""
    return each_after_all({index: segment.predecessors for index, segment in enumerate(problem.segments)})


class LayerRow:
    """Times and counts of the first i layers of the row, for every i.

    Boundaries are ``[candidate, num_virtual + 1]``, from 0 to ``num_layers``.
    """

    def __init__(self, problem: SplitProblem) -> None:
        self.problem = problem
        units = self._units()
        counts: Array = numpy.zeros((len(units) + 1, len(problem.segments)), dtype=numpy.int64)
        counts[1:] = numpy.cumsum(units, axis=0)
        self.counts: Array = counts[~problem.breaks_joint(counts)]
        """``[i, segment]``: layers of the segment among the first i."""
        self.num_layers = len(self.counts) - 1
        self.forward: Array = self.counts @ numpy.array([s.forward for s in problem.segments])
        self.backward: Array = self.counts @ numpy.array([s.backward for s in problem.segments])
        self.least_per_stage = 0 if problem.allow_empty_stages else 1

    def _units(self) -> list[list[int]]:
        """Return for every place in the row the number of layers of each segment there: a layer and its blocks."""
        segments = self.problem.segments
        units: list[list[int]] = []
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for k, segment in enumerate(segments):
            if segment.beside is None:
                first[k], last[k] = len(units), len(units) + segment.num_layers - 1
                units += [[int(j == k) for j in range(len(segments))] for _ in range(segment.num_layers)]
        for k, segment in enumerate(segments):
            if segment.beside is not None:
                units[first[segment.beside] if k < segment.beside else last[segment.beside]][k] += 1
        return units

    def held(self, ends: Array) -> Array:
        """Return layers by segment on every virtual stage: ``[candidate, virtual stage, segment]``."""
        return numpy.diff(self.counts[ends], axis=1)

    def forward_times(self, ends: Array) -> Array:
        """Return forward times, ``[candidate, virtual stage]``."""
        return numpy.diff(self.forward[ends], axis=1)

    def backward_times(self, ends: Array) -> Array:
        """Return backward times without recomputation, ``[candidate, virtual stage]``."""
        return numpy.diff(self.backward[ends], axis=1)

    def ends_of(self, placement: Placement) -> Array:
        """Return the boundaries of a placement that is a cut of the row."""
        solid = [k for k, segment in enumerate(self.problem.segments) if segment.beside is None]
        held: Array = numpy.array([numpy.sum(placement[k], axis=0) for k in solid]).sum(axis=0)
        ends: Array = numpy.searchsorted(self.counts[:, solid].sum(axis=1), numpy.cumsum([0, *held]))
        return ends

    def is_cut(self, ends: Array) -> Array:
        """Return which candidates leave no virtual stage empty, unless the problem allows that."""
        return (numpy.diff(ends, axis=1) >= self.least_per_stage).all(axis=1)

    def even(self, weight: Array, share: Array) -> Array:
        """Return boundaries that give every virtual stage about its ``share`` of the summed ``weight``."""
        targets: Array = numpy.cumsum(share)[:-1] / share.sum() * weight[-1]
        ends = numpy.concatenate([[0], numpy.searchsorted(weight, targets - 1e-9), [self.num_layers]])
        least = self.least_per_stage
        places = numpy.arange(len(ends))
        ends = numpy.maximum.accumulate(ends - least * places) + least * places
        return numpy.minimum(ends, self.num_layers - least * places[::-1])


def shifts(num_virtual: int) -> Array:
    """Return every way to shift boundaries i to j by one, ``[move, num_virtual + 1]``."""
    i, j = numpy.triu_indices(num_virtual - 1)
    places = numpy.arange(num_virtual + 1)
    shift = ((places > i[:, None]) & (places <= j[:, None] + 1)).astype(numpy.int64)
    return numpy.concatenate([shift, -shift])
