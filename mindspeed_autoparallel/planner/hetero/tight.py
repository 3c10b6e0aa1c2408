"""Exact search of a backbone's pipeline if encoders leave little memory.

The exact peak, in the pipeline and while an encoder runs, limits each rank's layers; the few remaining splits are all
timed. The split problem's rows bound a peak from one side only, and omit the memory that an encoder needs outside the
pipeline. Supports one module of equal layers without virtual stages, so that ranks do not depend on each other.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluated
from mindspeed_autoparallel.planner.hetero.backbone import BackboneSolver, Reserved, beside, outside_pipeline_bytes
from mindspeed_autoparallel.planner.layouts.layout_solver import LayoutResult
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.rank_memory import memory_of_rank
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, block_ns
from mindspeed_autoparallel.spec.recompute import in_order

MOST_SPLITS = 300
"""Most splits to time; if there are more, memory is not the bottleneck."""
MOST_WAYS = 500
"""Most combinations of recompute kinds to try for the layers of one rank."""
Counts = tuple[int, ...]
"""Recomputed layers of one rank, by kind."""


def search_tight(
    solver: BackboneSolver, reserved: Reserved, transient_bytes: int, deadline: float
) -> LayoutResult | None:
    """Return the best split, or the proof that none fits; ``None``: there are too many, the problem is of another kind,
    or time is up."""
    candidate = beside(solver.candidate, reserved)
    if candidate is None:
        return LayoutResult(proved_infeasible=True)
    profile, layout = candidate.profile, candidate.layout
    hides = layout.overlap_gradient_reduce or layout.paired or layout.sharding is not None
    if hides or layout.virtual_size > 1 or len(profile.model.modules) != 1 or profile.memory_semantics == "mindspeed":
        return None
    (module,) = profile.model.modules
    cost = candidate.measurement.modules[module.name]
    several = len(cost.layer.recompute) > 2 and (module.num_layers + 1) ** (len(cost.layer.recompute) - 1) > MOST_WAYS
    if several or len(cost.runs(0, module.num_layers)) > 1:
        return None
    outside_bytes = solver.candidate.limit_bytes - reserved.everywhere_bytes - transient_bytes
    ranks = _Ranks(candidate=candidate, outside_bytes=outside_bytes)
    most = [ranks.most_layers(rank) for rank in range(layout.pipeline_size)]
    if sum(most) < module.num_layers:
        return LayoutResult(proved_infeasible=True)
    if _num_splits(most, module.num_layers) > MOST_SPLITS:
        return None
    return _fastest(ranks, most, module.num_layers, deadline)


def _num_splits(most: Sequence[int], num_layers: int) -> int:
    """Return the number of splits with 1 to ``most`` layers on each rank."""
    ways = [1] + [0] * num_layers
    for limit in most:
        ways = [sum(ways[max(0, total - limit) : total]) for total in range(num_layers + 1)]
    return ways[num_layers]


def _splits(most: Sequence[int], num_layers: int) -> Iterator[tuple[int, ...]]:
    if len(most) == 1:
        if 1 <= num_layers <= most[0]:
            yield (num_layers,)
        return
    behind = sum(most[1:])
    for first in range(max(1, num_layers - behind), min(most[0], num_layers - len(most) + 1) + 1):
        for rest in _splits(most[1:], num_layers - first):
            yield (first, *rest)


def _fastest(ranks: _Ranks, most: Sequence[int], num_layers: int, deadline: float) -> LayoutResult | None:
    """Time all splits that may be the fastest, in the order of their busiest rank's time."""
    rows: list[tuple[float, Counts, tuple[Counts, ...]]] = []
    for split in _splits(most, num_layers):
        if time.monotonic() > deadline:
            return None
        ways = [ranks.way(rank, count) for rank, count in enumerate(split)]
        chosen = tuple(way for way in ways if way is not None)
        rows.append((ranks.busiest_us(split, chosen), split, chosen))
    rows.sort()
    best: Evaluation | None = None
    for bound_us, split, chosen in rows:
        if best is not None and bound_us >= best.step_us:
            break
        if time.monotonic() > deadline:
            return None
        found = evaluated(ranks.candidate, ranks.placement(split, chosen))
        if found.fits and (best is None or found.step_us < best.step_us):
            best = found
    if best is None:
        return LayoutResult(proved_infeasible=True)
    return LayoutResult(lower_bound_us=best.step_us, evaluation=best)


@dataclass(kw_only=True)
class _Ranks:
    """The layers that ranks of one layout can hold, by the exact peak."""

    candidate: Candidate
    outside_bytes: int
    """Bytes available for a rank's state while an encoder runs."""
    _known: dict[tuple[int, int], Counts | None] = field(default_factory=dict[tuple[int, int], Counts | None])

    def __post_init__(self) -> None:
        (module,) = self.candidate.profile.model.modules
        self._name, self._num_layers = module.name, module.num_layers
        self._layer = self.candidate.measurement.modules[module.name].layer
        self._kinds = in_order(kind for kind in self._layer.recompute if kind != "none")

    def most_layers(self, rank: int) -> int:
        """Return the most layers that a rank can hold: memory grows with every layer."""
        sizes = range(1, self._num_layers - self.candidate.layout.pipeline_size + 2)
        return bisect.bisect_left(sizes, True, key=lambda count: not self._fits_somehow(rank, count))

    def _fits_somehow(self, rank: int, count: int) -> bool:
        if len(self._kinds) != 1:
            return self.way(rank, count) is not None
        # Recomputing all layers needs least memory, apart from the transient of recomputation.
        return self._fits(rank, count, (count,)) or self._fits(rank, count, (0,))

    def way(self, rank: int, count: int) -> Counts | None:
        """Return the fastest recomputation of ``count`` layers that fits; ``None`` if none fits, or there are too
        many."""
        if (rank, count) not in self._known:
            ways = [way for way in itertools.product(range(count + 1), repeat=len(self._kinds)) if sum(way) <= count]
            ways.sort(key=lambda way: (self._extra_us(way), way))
            if len(self._kinds) == 1 and not self._fits(rank, count, ways[0]):
                # Beyond the first recomputed layer and its transient, recomputing more never needs more memory.
                at = bisect.bisect_left(ways, True, lo=1, key=lambda way: self._fits(rank, count, way))
                ways = ways[at : at + 1]
            self._known[rank, count] = next((way for way in ways if self._fits(rank, count, way)), None)
        return self._known[rank, count]

    def _extra_us(self, way: Counts) -> float:
        pairs = zip(self._kinds, way, strict=True)
        return sum(number * self._layer.recompute[kind].extra_backward_us for kind, number in pairs)

    def busiest_us(self, split: Sequence[int], ways: Sequence[Counts]) -> float:
        """Return the busiest rank's compute time in a step: a lower bound."""
        layer_us = block_ns(self._layer) / NS_PER_US
        busiest = max(count * layer_us + self._extra_us(way) for count, way in zip(split, ways, strict=True))
        return self.candidate.num_microbatches * busiest

    def placement(self, split: Sequence[int], ways: Sequence[Counts]) -> ModulePlacement:
        kinds = {kind: tuple(way[place] for way in ways) for place, kind in enumerate(self._kinds)}
        return ModulePlacement(layers={self._name: tuple(split)}, recompute={self._name: kinds})

    def _fits(self, rank: int, count: int, way: Counts) -> bool:
        """Return whether ``rank`` can hold ``count`` layers; independent of the other ranks."""
        size = self.candidate.layout.pipeline_size
        others = (self._num_layers - count) // max(1, size - 1)
        split, ways = [others] * size, [(0,) * len(self._kinds)] * size
        split[rank - 1] += self._num_layers - count - others * (size - 1)
        split[rank], ways[rank] = count, way
        memory = memory_of_rank(self.candidate, self.placement(split, ways), rank)
        return (
            memory.peak_bytes <= memory.limit_bytes
            and outside_pipeline_bytes(memory.terms, Reserved(), 0) <= self.outside_bytes
        )
